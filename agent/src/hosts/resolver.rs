//! The agent's own look-ups: names that stand in the configuration or in an operator's order, every
//! [`EVERY`], so that what is said about a name holds from the first connect.
//!
//! A thread of its own, since a look-up may wait for seconds. The system's resolver is asked, so
//! `/etc/hosts` and whatever else programs of this host use count. A name that cannot be resolved keeps
//! the addresses it had: that the resolver is down says nothing about them.

use std::{
    collections::HashSet,
    net::{IpAddr, ToSocketAddrs as _},
    sync::{Arc, mpsc as std_mpsc},
    time::Duration,
};

use anyhow::{Context as _, Result};
use tokio::sync::mpsc;

/// How often names are looked up again.
pub const EVERY: Duration = Duration::from_secs(30);
/// Names that are looked up; the rest is left out with a warning.
pub const MOST_NAMES: usize = 1024;
/// Results that may wait for the select loop.
const QUEUE: usize = 64;

/// What a look-up found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Found {
    /// Addresses of a name.
    Addresses(Arc<str>, Vec<IpAddr>),
    /// A name that cannot be looked up, and why. Said once, until it can.
    Failed(Arc<str>, String),
    /// Every name was looked up once since the last order or round.
    RoundEnded,
}

/// The select loop's end of the thread, which ends when this is dropped (and its look-up is over).
pub struct Resolver {
    orders: std_mpsc::Sender<Vec<Arc<str>>>,
    names: Vec<Arc<str>>,
}

impl Resolver {
    /// Starts the thread; it has no names yet.
    ///
    /// # Errors
    /// When the system gives no thread.
    pub fn start() -> Result<(Self, mpsc::Receiver<Found>)> {
        let (orders, wanted) = std_mpsc::channel();
        let (found, results) = mpsc::channel(QUEUE);
        std::thread::Builder::new()
            .name("backstop-lookup".into())
            .spawn(move || run(&wanted, &found))
            .context("start the thread that looks names up")?;
        let resolver = Self {
            orders,
            names: Vec::new(),
        };
        Ok((resolver, results))
    }

    /// These names from now on, at once and then again and again. Whether they are others than before.
    pub fn look_up(&mut self, mut names: Vec<Arc<str>>) -> bool {
        if names.len() > MOST_NAMES {
            tracing::warn!(
                "{} names stand in the configuration; only the first {MOST_NAMES} are looked up, and \
                 what is said about the others holds once a program has asked for them",
                names.len()
            );
            names.truncate(MOST_NAMES);
        }
        let are_others = names != self.names;
        self.names.clone_from(&names);
        // A thread that has ended looks nothing up.
        let _ = self.orders.send(names);
        are_others
    }

    /// The names that are looked up.
    pub fn names(&self) -> &[Arc<str>] {
        &self.names
    }
}

fn run(wanted: &std_mpsc::Receiver<Vec<Arc<str>>>, found: &mpsc::Sender<Found>) {
    let mut names: Vec<Arc<str>> = Vec::new();
    let mut news = None;
    // Said, and not over.
    let mut failing: HashSet<Arc<str>> = HashSet::new();
    loop {
        failing.retain(|name| names.contains(name));
        if let Some(new) = news.take() {
            names = new;
        } else if names.is_empty() {
            match wanted.recv() {
                Ok(new) => names = new,
                Err(_) => return,
            }
        } else {
            match wanted.recv_timeout(EVERY) {
                Ok(new) => names = new,
                Err(std_mpsc::RecvTimeoutError::Timeout) => {}
                Err(std_mpsc::RecvTimeoutError::Disconnected) => return,
            }
        }
        for name in &names {
            match wanted.try_recv() {
                Ok(new) => {
                    news = Some(new);
                    break;
                }
                Err(std_mpsc::TryRecvError::Empty) => {}
                Err(std_mpsc::TryRecvError::Disconnected) => return,
            }
            let sent = match addresses(name) {
                Ok(addresses) => {
                    failing.remove(name);
                    found.blocking_send(Found::Addresses(Arc::clone(name), addresses))
                }
                Err(error) => {
                    if failing.insert(Arc::clone(name)) {
                        let error = error.to_string();
                        found.blocking_send(Found::Failed(Arc::clone(name), error))
                    } else {
                        Ok(())
                    }
                }
            };
            if sent.is_err() {
                return;
            }
        }
        if news.is_none() && found.blocking_send(Found::RoundEnded).is_err() {
            return;
        }
    }
}

fn addresses(name: &str) -> std::io::Result<Vec<IpAddr>> {
    let mut addresses: Vec<IpAddr> = Vec::new();
    for address in (name, 0).to_socket_addrs()? {
        let addr = address.ip().to_canonical();
        let useless = addr.is_unspecified() || addr.is_multicast();
        if !useless && !addresses.contains(&addr) {
            addresses.push(addr);
        }
    }
    addresses.truncate(super::answer::MOST_ADDRESSES);
    Ok(addresses)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_looked_up_at_once_and_after_an_order() {
        let (mut resolver, mut found) = Resolver::start().unwrap();
        // Resolved without any server.
        assert!(resolver.look_up(vec!["127.0.0.7".into()]));
        let one = found.blocking_recv().unwrap();
        let addresses = vec![IpAddr::from([127, 0, 0, 7])];
        assert_eq!(one, Found::Addresses("127.0.0.7".into(), addresses));
        assert_eq!(found.blocking_recv(), Some(Found::RoundEnded));
        assert!(!resolver.look_up(vec!["127.0.0.7".into()]));
        assert!(matches!(found.blocking_recv(), Some(Found::Addresses(..))));
        assert_eq!(found.blocking_recv(), Some(Found::RoundEnded));
        assert!(resolver.look_up(vec!["0.0.0.0".into()]));
        let none = found.blocking_recv().unwrap();
        assert_eq!(none, Found::Addresses("0.0.0.0".into(), Vec::new()));
        drop(resolver);
        while found.blocking_recv().is_some() {}
    }
}

//! The way back: rows for the breakers of the agent before, made before anything is attached, so that
//! the very first connect meets them.
//!
//! A breaker is for a control group (by its path), a network namespace and a destination. It is
//! dropped where one of them is gone, or has become somebody else's: the namespace must have the same
//! cookie. It is dropped, too, when the machine was started anew, or when no agent ran for
//! [`TOO_OLD`]. What is restored open is confirmed by a dial of the agent.
//!
//! What programs were told about names comes back first: names choose policies, and make groups. If an
//! answer that gives some of a name's addresses were all that is known of it, the group would seem to be
//! smaller than it is, and a breaker of it might be closed for that.

use std::{
    collections::{HashMap, HashSet},
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    sync::Arc,
};

use agent_common::{
    Row, Verdict,
    row::ROW_PROTECTED,
    window::{SLOTS, decode},
};
use anyhow::Result;
use tokio::sync::oneshot;

use super::file::{Calls, Document, Kept, Manual, Name, TOO_OLD, is_of_this_boot};
use crate::{
    control::api::{FOR_MAX, Timestamp, check_order_workload, check_workload},
    core::{Nanos, Saved, WindowKind},
    daemon::{
        named::{Naming, Sizes},
        orders::{MOST, Orders, Standing},
        plan::Plan,
        reactor::{Command, Commander},
    },
    hosts::{HostNames, table::EVERYWHERE},
    kernel::{Kernel, clock},
    policy::{Destination, DestinationArg, KnownName},
    sockets::namespace::{Namespaces, Place, netns_cookie_here},
};

/// What came back.
#[derive(Default)]
pub struct Restored {
    /// What operators have ordered.
    pub orders: Orders,
    /// Orders whose time was over before this agent ran.
    pub over: Vec<Manual>,
    /// Breakers that are not closed.
    pub open: usize,
    /// Rows in all.
    pub rows: usize,
}

impl Restored {
    /// In a few words; `None`: nothing came back.
    pub fn said(&self) -> Option<String> {
        let orders = self.orders.all().count() as u64;
        if self.rows == 0 && orders == 0 {
            return None;
        }
        let number = |of: u64, what: &str| format!("{of} {what}{}", if of == 1 { "" } else { "s" });
        let breakers = number(self.rows as u64, "breaker");
        let closed = match self.open {
            0 => "closed".to_owned(),
            open => format!("{open} not closed"),
        };
        Some(format!(
            "{breakers} ({closed}) and {} by hand came back from the agent before",
            number(orders, "order")
        ))
    }
}

/// What rows are made of and where.
pub struct Ground<'a> {
    /// The kernel's maps.
    pub kernel: &'a mut Kernel,
    /// The configuration in force.
    pub plan: &'a Arc<Plan>,
    /// Where the cgroup v2 hierarchy is mounted.
    pub mount: &'a Path,
    /// What is watched.
    pub cgroups: &'a [PathBuf],
    /// Names that the agent has resolved.
    pub naming: &'a mut Naming,
    /// The event thread.
    pub commander: &'a Commander,
}

/// Restores what still holds.
pub async fn restore(document: Document, ground: Ground<'_>) -> Restored {
    let now = clock::now();
    let Ground {
        kernel,
        plan,
        mount,
        cgroups,
        naming,
        commander,
    } = ground;
    let mut restored = Restored::default();
    let age = now - Nanos(document.written_ns);
    let boot = document.boot.clone();
    if is_of_this_boot(&boot) {
        let told = document.names.iter().filter_map(Name::told);
        naming.hosts.restore(told, now);
    }
    let mut orders = Orders::default();
    for manual in document.manual.into_iter().take(MOST) {
        if Timestamp::now().until(manual.until).is_zero() {
            restored.over.push(manual);
            continue;
        }
        match standing(manual, now, plan, &naming.hosts) {
            Ok(order) => order.into_iter().for_each(|order| {
                orders.give(order);
            }),
            Err(error) => tracing::warn!("a manual state does not come back: {error:#}"),
        }
    }
    if let Err(error) = orders.enter(kernel, &naming.hosts, plan) {
        tracing::warn!("manual states for rows to come: {error:#}");
    }
    restored.orders = orders;
    let orders = &mut restored.orders;
    if !document.breakers.is_empty() && (!is_of_this_boot(&boot) || age > TOO_OLD) {
        tracing::info!(
            "breakers of the agent before are not restored: they were last written down {}",
            document.written
        );
        return restored;
    }
    let table = kernel.table();
    let canonical = |path: &Path| path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let mount = canonical(mount);
    let cgroups: Vec<PathBuf> = cgroups.iter().map(|path| canonical(path)).collect();
    let cookies = cookies(&document.breakers);
    // Room is left for destinations to come: from 90 % on, rows are given up.
    let room = (table.len() - 1) as usize * 3 / 4;
    let mut breakers = Vec::new();
    let mut told = Vec::new();
    let mut endpoints = Vec::new();
    let mut sizes = Sizes::default();
    for kept in document.breakers.iter().take(room) {
        let hosts = &naming.hosts;
        let made = row(kept, &cookies, &mount, &cgroups, plan, hosts, now)
            .and_then(|(row, to)| Some((kernel.make_row(row)?, row.key, to)));
        let Some((id, key, destination)) = made else {
            continue;
        };
        let mut saved = Saved::from(&kept.breaker);
        for (place, kind) in [WindowKind::Connects, WindowKind::Exchanges]
            .into_iter()
            .enumerate()
        {
            let calls = sane(&kept.calls[place]);
            table.put_calls(
                id.index,
                kind,
                calls.last,
                &calls.entries,
                failed(&calls, now),
            );
            // A floor above the last call would hide those to come.
            saved.floor_seqs[place] = saved.floor_seqs[place].min(calls.last);
        }
        let names = names_of(kept, &destination, hosts);
        let order = orders.tell(id, &destination, &names, &kept.workload, false, now);
        told.extend(order.map(|order| (id, order)));
        endpoints.extend(naming.endpoint(id, &key, &names, &mut sizes));
        breakers.push((id, saved));
    }
    restored.rows = breakers.len();
    let (reply, answer) = oneshot::channel();
    commander.send(Command::Restore(breakers, reply));
    restored.open = answer.await.unwrap_or(0);
    // All of them at once: in the middle too many of a group would seem to be open.
    commander.send(Command::Groups(endpoints));
    commander.send(Command::Manual(told));
    // Commands are handled in order: with this answer they are in force, before anything is attached.
    let (reply, answer) = oneshot::channel();
    commander.send(Command::Save(0, reply));
    let _ = answer.await;
    restored
}

/// A manual state whose time is not over.
fn standing(
    manual: Manual,
    now: Nanos,
    plan: &Plan,
    hosts: &HostNames,
) -> Result<Option<Standing>> {
    let left = Timestamp::now().until(manual.until).min(FOR_MAX);
    let destination: DestinationArg = manual.destination.parse()?;
    if let Some(workload) = &manual.workload {
        // Nobody could take it back.
        check_order_workload(workload).map_err(anyhow::Error::msg)?;
    }
    let protected = match &destination {
        DestinationArg::Address(address) => {
            let names = hosts.of(EVERYWHERE, &address.addr_bytes());
            plan.config.resolve(address, None, &names).protected
        }
        // Address by address, where it is put in force.
        DestinationArg::Name { .. } => false,
    };
    if left.is_zero() || protected {
        return Ok(None);
    }
    Ok(Some(Standing {
        destination,
        workload: manual.workload,
        trip: manual.trip,
        until: now + Nanos(u64::try_from(left.as_nanos()).unwrap_or(u64::MAX)),
        since: manual.since,
        ends: manual.until,
        by: manual.by.into(),
    }))
}

/// Names of a kept breaker's address.
fn names_of(kept: &Kept, destination: &Destination, hosts: &HostNames) -> Vec<KnownName> {
    hosts.of(kept.netns_cookie, &destination.addr_bytes())
}

/// The row for a breaker; `None` where what it was for is no more, or is protected now.
fn row(
    kept: &Kept,
    cookies: &HashMap<u32, u64>,
    mount: &Path,
    cgroups: &[PathBuf],
    plan: &Plan,
    hosts: &HostNames,
    now: Nanos,
) -> Option<(Row, Destination)> {
    if cookies.get(&kept.netns) != Some(&kept.netns_cookie) {
        return None;
    }
    check_workload(&kept.workload).ok()?;
    let group = match kept.workload.as_str() {
        "/" => mount.to_owned(),
        below => mount.join(below),
    };
    if !cgroups.iter().any(|watched| group.starts_with(watched)) {
        return None;
    }
    let group = std::fs::metadata(group)
        .ok()
        .filter(|group| group.is_dir())?;
    let destination: Destination = kept.destination.parse().ok()?;
    let names = names_of(kept, &destination, hosts);
    let settings = plan.settings_for(&destination, &kept.workload, &names);
    if settings.flags & ROW_PROTECTED != 0 {
        return None;
    }
    let row = Row {
        key: destination.to_key(group.ino(), kept.netns_cookie),
        netns_inode: kept.netns,
        created_ns: now.0,
        verdict: Verdict {
            generation: kept.breaker.generation,
            ..Verdict::default()
        }
        .pack(),
        settings,
        last_connect_ns: now.0,
        last_pid: kept.pid,
        ..bytemuck::Zeroable::zeroed()
    };
    Some((row, destination))
}

/// Calls as a window can hold them.
fn sane(calls: &Calls) -> Calls {
    /// No row comes near it.
    const MOST: u64 = 1 << 48;
    let count = calls.entries.len() as u64;
    if count > calls.last || calls.entries.len() > SLOTS || calls.last > MOST {
        return Calls::default();
    }
    calls.clone()
}

fn failed(calls: &Calls, now: Nanos) -> u64 {
    let seqs = (1..=calls.last).rev();
    let decoded = seqs.zip(calls.entries.iter().rev());
    decoded
        .filter(|(seq, entry)| decode(**entry, *seq, now.0).is_some_and(|call| call.failed))
        .count() as u64
}

/// The cookie that each namespace has now. On a thread of its own, because entering concerns a thread.
fn cookies(breakers: &[Kept]) -> HashMap<u32, u64> {
    let look = || {
        let mut namespaces = Namespaces::default();
        let mut cookies = HashMap::new();
        let mut gone = HashSet::new();
        for kept in breakers {
            let inode = kept.netns;
            if cookies.contains_key(&inode) || gone.contains(&inode) {
                continue;
            }
            let place = Place {
                inode,
                pids: &[kept.pid],
            };
            match namespaces.within(place, netns_cookie_here) {
                Ok(Some(cookie)) => {
                    cookies.insert(inode, cookie);
                }
                Ok(None) | Err(_) => {
                    gone.insert(inode);
                }
            }
        }
        cookies
    };
    std::thread::scope(|scope| scope.spawn(look).join().unwrap_or_default())
}

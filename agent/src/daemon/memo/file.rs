//! The files: their form, written whole or not at all, and set aside when they are not ours.

use std::{
    fs,
    io::{BufWriter, Write as _},
    net::{IpAddr, Ipv6Addr},
    path::{Path, PathBuf},
    sync::Arc,
};

use anyhow::{Context as _, Result, ensure};
use serde::{Deserialize, Serialize};

use crate::{
    control::api::{Bypass, Reason, ReasonKind, State, Timestamp, Window},
    core::{self, Nanos, Saved},
    files,
    hosts::table::Told,
    policy::{self, Destination, DestinationArg},
};

/// The form below; another one is set aside.
const VERSION: u32 = 3;
/// Those before it are read, too: the first lacks `bypassed`, and both lack `names`. What they have means
/// the same.
const OLDEST: u32 = 1;

/// A file that is larger is none of ours: so many breakers with full windows and so many names take 24 MiB.
const LARGEST: u64 = 32 << 20;

/// Breakers that are kept, those first that are not closed. Bounds the file, and what it takes to
/// write it (docs/COST.md).
pub const MOST_BREAKERS: usize = 4096;

/// What was true so long ago is not worth a refusal. Longer than the cooldown of most.
pub const TOO_OLD: Nanos = Nanos::from_secs(600);

/// Everything that is kept.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Document {
    /// Form of the file.
    pub version: u32,
    /// When it was written.
    pub written: Timestamp,
    /// The same on CLOCK_MONOTONIC, ns: what all times but those of manual states are of.
    pub written_ns: u64,
    /// Which start of the machine that clock is of.
    pub boot: String,
    /// Breakers that were not quiet.
    pub breakers: Vec<Kept>,
    /// Manual states.
    pub manual: Vec<Manual>,
    /// What programs were told about names.
    #[serde(default)]
    pub names: Vec<Name>,
}

/// [`Told`]: a name of an address, in one network namespace.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(missing_docs, reason = "each is a field of `Told`")]
pub struct Name {
    pub name: String,
    pub address: IpAddr,
    pub netns_cookie: u64,
    pub asked: bool,
    pub since_ns: u64,
    pub seen_ns: u64,
    pub until_ns: u64,
    pub newest_ns: u64,
}

impl From<&Told> for Name {
    fn from(told: &Told) -> Self {
        Self {
            name: told.name.to_string(),
            address: Ipv6Addr::from(told.addr).to_canonical(),
            netns_cookie: told.netns,
            asked: told.asked,
            since_ns: told.since.0,
            seen_ns: told.seen.0,
            until_ns: told.until.0,
            newest_ns: told.newest.0,
        }
    }
}

impl Name {
    /// `None` where it is no name that a host can have.
    pub fn told(&self) -> Option<Told> {
        let name = policy::host_name(&self.name)?;
        Some(Told {
            netns: self.netns_cookie,
            addr: Destination::new(self.address, 0, 0).addr_bytes(),
            name: name.into(),
            asked: self.asked,
            since: Nanos(self.since_ns),
            seen: Nanos(self.seen_ns),
            until: Nanos(self.until_ns),
            newest: Nanos(self.newest_ns),
        })
    }
}

/// A breaker and its windows.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Kept {
    /// Address and port.
    pub destination: String,
    /// Path of the control group.
    pub workload: String,
    /// Inode of the network namespace.
    pub netns: u32,
    /// Its cookie: inodes are used again.
    pub netns_cookie: u64,
    /// The last process that connected: the likeliest way into the namespace.
    pub pid: u32,
    /// The last calls: connects, exchanges.
    pub calls: [Calls; 2],
    /// The breaker.
    pub breaker: Breaker,
}

/// The last calls in a window.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Calls {
    /// Number of the last one.
    pub last: u64,
    /// As they lie in the window ([`agent_common::window::encode`]), the last one last.
    pub entries: Vec<u32>,
}

/// [`Saved`], in the words of the interface.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(missing_docs, reason = "each is a field of `Saved`")]
pub struct Breaker {
    pub state: State,
    pub since_ns: u64,
    pub reason: Reason,
    #[serde(default)]
    pub bypassed: Option<Bypass>,
    pub generation: u32,
    pub until_ns: u64,
    pub cooldown_ns: u64,
    pub healthy_since_ns: u64,
    pub misled: u32,
    pub distrust_until_ns: u64,
    pub outage_since_ns: u64,
    pub floor_seqs: [u64; 2],
    pub floor_at_ns: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub broken_after_ns: Option<u64>,
}

impl From<&Saved> for Breaker {
    fn from(saved: &Saved) -> Self {
        Self {
            state: super::super::view::state(saved.state),
            since_ns: saved.since.0,
            reason: super::super::view::reason(saved.reason),
            bypassed: saved.bypassed.map(super::super::view::bypass),
            generation: saved.generation,
            until_ns: saved.until.0,
            cooldown_ns: saved.cooldown.0,
            healthy_since_ns: saved.healthy_since.0,
            misled: saved.misled,
            distrust_until_ns: saved.distrust_until.0,
            outage_since_ns: saved.outage_since.0,
            floor_seqs: saved.floor_seqs,
            floor_at_ns: saved.floor_at.0,
            broken_after_ns: saved.broken_after.map(|lived| lived.0),
        }
    }
}

impl From<&Breaker> for Saved {
    fn from(kept: &Breaker) -> Self {
        Self {
            state: match kept.state {
                State::Open => core::State::Open,
                State::HalfOpen => core::State::HalfOpen,
                State::Closed | State::ForcedOpen | State::ForcedClosed => core::State::Closed,
            },
            since: Nanos(kept.since_ns),
            reason: core::Reason {
                window: match kept.reason.window {
                    Window::Connects => core::WindowKind::Connects,
                    Window::Exchanges => core::WindowKind::Exchanges,
                    Window::None => core::WindowKind::None,
                },
                kind: match kept.reason.kind {
                    ReasonKind::FailureRate => core::ReasonKind::FailureRate,
                    ReasonKind::ConsecutiveFailures => core::ReasonKind::ConsecutiveFailures,
                    ReasonKind::SlowCallRate => core::ReasonKind::SlowCallRate,
                    ReasonKind::ProbeFailed => core::ReasonKind::ProbeFailed,
                    ReasonKind::Manual => core::ReasonKind::Manual,
                    ReasonKind::None => core::ReasonKind::None,
                },
                value: kept.reason.value,
                threshold: kept.reason.threshold,
            },
            bypassed: kept.bypassed.map(|bypassed| match bypassed {
                Bypass::Correlated => core::Bypass::Correlated,
                Bypass::MaxOpenShare => core::Bypass::MaxOpenShare,
            }),
            generation: kept.generation,
            until: Nanos(kept.until_ns),
            cooldown: Nanos(kept.cooldown_ns),
            healthy_since: Nanos(kept.healthy_since_ns),
            misled: kept.misled,
            distrust_until: Nanos(kept.distrust_until_ns),
            outage_since: Nanos(kept.outage_since_ns),
            floor_seqs: kept.floor_seqs,
            floor_at: Nanos(kept.floor_at_ns),
            broken_after: kept.broken_after_ns.map(Nanos),
        }
    }
}

/// A manual state. In the file the oldest is the first: of those that cover a row the newest is in force.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manual {
    /// Address, or name, and port.
    pub destination: String,
    /// For whom; `None`: all.
    pub workload: Option<String>,
    /// Refused, or held closed.
    pub trip: bool,
    /// When it was asked for.
    pub since: Timestamp,
    /// When it ends by itself.
    pub until: Timestamp,
    /// Who asked for it.
    pub by: String,
}

impl Document {
    /// An empty one of now.
    pub fn new(now: Nanos) -> Self {
        Self {
            version: VERSION,
            written: Timestamp::now(),
            written_ns: now.0,
            boot: boot(),
            ..Self::default()
        }
    }

    /// Whether it is of the form that this agent knows.
    pub fn is_known(&self) -> bool {
        (OLDEST..=VERSION).contains(&self.version)
    }

    /// Names that manual states are for, not those that programs were told.
    pub fn names(&self) -> Vec<Arc<str>> {
        let names =
            self.manual
                .iter()
                .filter_map(|manual| match manual.destination.parse().ok()? {
                    DestinationArg::Name { name, .. } => Some(name.into()),
                    DestinationArg::Address(_) => None,
                });
        names.collect()
    }
}

/// Whether a document's clock is that of now: the machine has not been started anew since.
pub fn is_of_this_boot(of: &str) -> bool {
    !of.is_empty() && of == boot()
}

/// Names the start of the machine; empty where the kernel does not tell.
fn boot() -> String {
    fs::read_to_string("/proc/sys/kernel/random/boot_id")
        .map(|text| text.trim().to_owned())
        .unwrap_or_default()
}

/// Where it lies, without the names.
pub fn path(state_dir: &Path) -> PathBuf {
    state_dir.join("state.json")
}

/// Where the names lie, in the same form: there can be many, and they change for other reasons.
pub fn names_path(state_dir: &Path) -> PathBuf {
    state_dir.join("names.json")
}

/// What the agent before has left in both files; `None` where there is nothing that can be used.
///
/// # Errors
/// As [`read`].
pub fn read_both(state_dir: &Path, now: Nanos) -> Result<Option<Document>> {
    let state = read(&path(state_dir))?;
    let Some(mut names) = read(&names_path(state_dir))? else {
        return Ok(state);
    };
    let age = now - Nanos(names.written_ns);
    if !is_of_this_boot(&names.boot) {
        names.names.clear();
    } else if age > TOO_OLD {
        // Newer answers may have been missed.
        names.names.retain(|name| name.until_ns > now.0);
    }
    Ok(Some(match state {
        Some(state) => Document {
            names: names.names,
            ..state
        },
        None => names,
    }))
}

/// Reads the file of the agent before; `None` where there is none that can be used. One that is
/// damaged, of another form or too large, and whatever is no file, is set aside with a warning, beside the
/// one that will be written.
///
/// # Errors
/// When it is there and cannot be read.
pub fn read(path: &Path) -> Result<Option<Document>> {
    let document = match files::read(path, LARGEST + 1) {
        Ok(bytes) => parse(&bytes),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) if files::is_no_file(&error) => Err(error.into()),
        Err(error) => return Err(error).with_context(|| format!("read {}", path.display())),
    };
    match document {
        Ok(document) => Ok(Some(document)),
        Err(error) => {
            let so = "and what it should tell starts from nothing";
            files::set_aside(path, &format!("{error:#}"), so);
            Ok(None)
        }
    }
}

fn parse(bytes: &[u8]) -> Result<Document> {
    #[derive(Deserialize)]
    struct Form {
        version: u32,
    }
    ensure!(
        bytes.len() as u64 <= LARGEST,
        "larger than {} MiB, which no state of this agent is",
        LARGEST >> 20
    );
    let Form { version } = serde_json::from_slice(bytes).context("not a state of an agent")?;
    ensure!(
        (OLDEST..=VERSION).contains(&version),
        "form {version}, where this agent knows forms {OLDEST} to {VERSION}"
    );
    serde_json::from_slice(bytes).context("not a state of an agent")
}

/// Writes it whole: a crash at any moment leaves the old file or the new one.
///
/// # Errors
/// When it cannot be written; the old one is still there then.
pub fn write(path: &Path, document: &Document) -> Result<()> {
    files::replace(path, |file| {
        let mut buffer = BufWriter::new(file);
        serde_json::to_writer(&mut buffer, document)?;
        buffer.flush()
    })
    .with_context(|| format!("write {}", path.display()))
}

#[cfg(test)]
mod tests;

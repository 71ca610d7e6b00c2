//! Probes that wait for an answer: what is told of them while they wait (`core::breaker::broken`).
//!
//! There are few probes at a time, and most end at once; of those that go on, the kernel is asked whether the
//! connection is well: what was sent is acknowledged, and nobody has closed it.

use agent_common::{
    Row,
    stamp::{KIND_REQUEST, STAMP_PROBE, STAMP_PROBE_BY_EXCHANGE, kind_of_request},
};

use super::{
    Owed, Rows, Shared,
    abort::{Aborter, likely, target},
};
use crate::{
    core::{Nanos, PROBE_WAITS, RowId},
    daemon::reactor::Command,
    sockets::look::{Look, State},
};

/// A probe that waits.
#[derive(Clone, Copy, Debug)]
pub struct ProbeWaits {
    /// Its row.
    pub row: RowId,
    /// Generation of the verdict under which it began.
    pub generation: u32,
    /// For how long.
    pub waited: Nanos,
    /// The destination has never answered anybody, or answers nobody an exchange like this one.
    pub answers_nobody: bool,
}

/// Probes that are asked about in one call.
const AT_ONCE: usize = 128;
/// A peer that acknowledges what is sent has done so within this, ms.
const ACKNOWLEDGED: u32 = 1000;

/// Tells the event thread of the probes among exchanges without an answer.
pub(super) fn look(shared: &Shared, owed: &[Owed], aborter: &mut Aborter, now: Nanos) {
    let mut rows = Rows::default();
    let mut probes: Vec<(Owed, Row)> = owed
        .iter()
        .filter(|owed| waits(owed, now))
        .filter_map(|owed| Some((*owed, *rows.get(shared, owed.row())?)))
        .collect();
    probes.sort_by_key(|(_, row)| row.netns_inode);
    for group in probes.chunk_by(|(_, a), (_, b)| a.netns_inode == b.netns_inode) {
        ask(shared, group, aborter, now);
    }
}

/// Whether it is a probe, and nothing but the answer is to come.
fn waits(owed: &Owed, now: Nanos) -> bool {
    const BOTH: u32 = STAMP_PROBE | STAMP_PROBE_BY_EXCHANGE;
    owed.stamp.flags & BOTH == BOTH
        && kind_of_request(owed.stamp.request) == KIND_REQUEST
        && !owed.wait.sending
        && now - owed.wait.begun >= PROBE_WAITS
}

/// Asks about connections of one namespace.
fn ask(shared: &Shared, group: &[(Owed, Row)], aborter: &mut Aborter, now: Nanos) {
    let Some((_, first)) = group.first() else {
        return;
    };
    let inode = first.netns_inode;
    let pids = likely(
        group
            .iter()
            .map(|(owed, row)| (owed.stamp.pid, row.last_pid)),
    );
    let beat = std::sync::Arc::clone(aborter.beat());
    let result = aborter.within(inode, &pids, |diag| {
        for part in group.chunks(AT_ONCE) {
            if beat.is_replaced() {
                break;
            }
            let targets: Vec<_> = part
                .iter()
                .map(|(owed, _)| target(owed.cookie, &owed.stamp))
                .collect();
            let found = |at: usize, look: Option<Look>| {
                if let (Some((owed, row)), Some(look)) = (part.get(at), look)
                    && is_well(&look)
                {
                    tell(shared, owed, row, now);
                }
            };
            let cookies = part.iter().map(|(owed, _)| owed.cookie);
            beat.during(cookies, || diag.look_all(&targets, found))?;
        }
        Ok(())
    });
    if let Some(Err(error)) = result {
        aborter.complain(inode, &error);
    }
}

fn tell(shared: &Shared, owed: &Owed, row: &Row, now: Nanos) {
    shared.commander.send(Command::ProbeWaits(ProbeWaits {
        row: owed.row(),
        generation: owed.stamp.generation,
        waited: now - owed.wait.begun,
        answers_nobody: row.responses == 0 || owed.is_usual(row),
    }));
}

/// Whether the peer has what was sent, and has not closed. (A program may send on and on, so that something is
/// always under way.)
fn is_well(look: &Look) -> bool {
    let arrives = look.tcp.is_some_and(|tcp| {
        tcp.retransmits == 0 && tcp.probes == 0 && tcp.last_ack_recv_ms <= ACKNOWLEDGED
    });
    matches!(
        look.state,
        State::Established | State::FinWait1 | State::FinWait2
    ) && !look.peer_reads_nothing()
        && (look.send_queue == 0 || arrives)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sockets::look::{Tcp, Timer, Tuple};

    fn idle() -> Look {
        let end = ([127, 0, 0, 1], 514).into();
        Look {
            tuple: Tuple::new(end, end, 0),
            is_inet6: false,
            cookie: 1,
            state: State::Established,
            timer: Timer::None,
            timer_runs: 0,
            timer_left_ms: 0,
            inode: 1,
            uid: 0,
            receive_queue: 0,
            send_queue: 0,
            cgroup_id: 1,
            tcp: Some(Tcp::default()),
        }
    }

    #[test]
    fn a_connection_that_is_well() {
        assert!(is_well(&idle()));
        let sends = Look {
            send_queue: 10,
            timer: Timer::Retransmit,
            ..idle()
        };
        assert!(is_well(&sends));
        let half_closed = Look {
            state: State::FinWait2,
            ..idle()
        };
        assert!(is_well(&half_closed));
    }

    #[test]
    fn and_ones_that_are_not() {
        let tcp = |tcp| Look {
            send_queue: 10,
            tcp: Some(tcp),
            ..idle()
        };
        for sick in [
            Look {
                state: State::CloseWait,
                ..idle()
            },
            Look {
                timer: Timer::WindowProbe,
                ..idle()
            },
            tcp(Tcp {
                retransmits: 1,
                ..Tcp::default()
            }),
            tcp(Tcp {
                last_ack_recv_ms: ACKNOWLEDGED + 1,
                ..Tcp::default()
            }),
            Look {
                tcp: None,
                ..tcp(Tcp::default())
            },
        ] {
            assert!(!is_well(&sick), "{sick:?}");
        }
    }
}

//! How long an exchange may wait, and data may lie still: the timeouts that the agent watches
//! itself.

use super::{Nanos, hung::Wait};

/// The timeouts of a policy; `None`: off.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WaitLimits {
    /// Longest silence while an answer is owed, from the last byte of the request.
    pub read: Option<Nanos>,
    /// Longest time of the whole operation, from its beginning.
    pub deadline: Option<Nanos>,
    /// Longest time in which queued data makes no progress.
    pub write: Option<Nanos>,
    /// Longest silence in the middle of an answer that is known to be unfinished.
    pub stall: Option<Nanos>,
    /// `stall` is also for answers that may rightly pause, or may be finished.
    pub stall_widely: bool,
    /// The read timeout acts by options of the socket, and an abort behind them.
    pub by_option: bool,
}

/// What options of a socket bound, where the read timeout acts by them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OptionLimits {
    /// Of a blocking receive (SO_RCVTIMEO).
    pub receive: Nanos,
    /// Of a blocking send (SO_SNDTIMEO).
    pub send: Nanos,
}

/// An exchange that an option bounds may go on for so long beyond the timeout, or a tenth of it,
/// before the connection is ended: the program has the time to act upon what the option tells it.
const BEHIND_OPTION: Nanos = Nanos::from_millis(100);

/// Which timeout.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Limit {
    /// The answer is owed for too long.
    Read,
    /// The whole operation took too long.
    Deadline,
    /// Queued data made no progress.
    Write,
    /// An answer stopped in the middle.
    Stall,
}

/// The next timeout of an exchange.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Due {
    /// When it fires.
    pub at: Nanos,
    /// Which one.
    pub limit: Limit,
    /// Its value.
    pub value: Nanos,
    /// Since when it counts.
    pub since: Nanos,
}

impl WaitLimits {
    /// Which timeout fires first for an exchange without an answer; `None` when all are off. The
    /// read timeout's time moves while the program goes on sending, and does not run while it is known that
    /// more of the request is to come. `has_option`: an option of the
    /// socket bounds the exchange already.
    pub fn due(&self, wait: Wait, has_option: bool) -> Option<Due> {
        let due = |limit, value: Option<Nanos>, since: Nanos| {
            value.map(|value| Due {
                at: since + value,
                limit,
                value,
                since,
            })
        };
        let read = self.read.filter(|_| !wait.sending);
        let read = due(Limit::Read, read, wait.asked).map(|read| match has_option {
            true => Due {
                at: read.at + BEHIND_OPTION.max(Nanos(read.value.0 / 10)),
                ..read
            },
            false => read,
        });
        let deadline = due(Limit::Deadline, self.deadline, wait.operation);
        [read, deadline].into_iter().flatten().min_by_key(|d| d.at)
    }

    /// What options are to bound; `None`: none are to be set. A send is bounded by the write timeout
    /// where there is one.
    pub fn options(&self) -> Option<OptionLimits> {
        let receive = self.read.filter(|_| self.by_option)?;
        let send = self.write.unwrap_or(receive);
        Some(OptionLimits { receive, send })
    }

    /// Whether the agent has to look at connections at all on which no answer is owed.
    pub fn watch_connections(&self) -> bool {
        self.write.is_some() || self.stall.is_some()
    }

    /// Whether it has to look at all of them, and not only at those with an unfinished answer of a protocol
    /// that it knows.
    pub fn watch_all(&self) -> bool {
        self.write.is_some() || (self.stall.is_some() && self.stall_widely)
    }

    /// How often to look, so that none is noticed much too late: twice in the time of an exchange,
    /// which has a timer of its own once it was seen; four times in the others, which are only
    /// noticed by looking. `None`: all are off.
    pub fn look_every(&self) -> Option<Nanos> {
        let halves = [self.read, self.deadline].into_iter().flatten();
        let halves = halves.map(Nanos::half);
        let quarter = |value: Nanos| value.half().half();
        let write = self.write.map(|value| quarter(value).min(LONGEST_QUARTER));
        halves.chain(write).chain(self.stall.map(quarter)).min()
    }
}

/// Queued data is looked at at least this often: with it, a write timeout is late by at most twice
/// as much. (A stall may be late by half of its value, and 2 s at most, which a look a second makes.)
const LONGEST_QUARTER: Nanos = Nanos::from_millis(200);

/// Whether the data that a program has queued moves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    acked: u64,
    /// `None`: nothing was queued at the last look.
    still_since: Option<Nanos>,
}

impl Progress {
    /// Notes a look: bytes that the peer has acknowledged since the beginning, and bytes that it
    /// has not. Returns since when nothing has moved, though something is queued.
    pub fn see(&mut self, now: Nanos, acked: u64, queued: u64) -> Option<Nanos> {
        let moved = acked != self.acked;
        self.acked = acked;
        self.still_since = match self.still_since {
            _ if queued == 0 => None,
            Some(since) if !moved => Some(since),
            _ => Some(now),
        };
        self.still_since
    }

    /// Whether something was queued at the last look.
    pub fn is_queued(&self) -> bool {
        self.still_since.is_some()
    }
}

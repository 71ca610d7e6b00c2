//! How long an exchange may wait: the timeouts that the agent watches itself.

use super::{Nanos, hung::Wait};

/// The timeouts of a policy; `None`: off.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WaitLimits {
    /// Longest silence while an answer is owed, from the last byte of the request.
    pub read: Option<Nanos>,
    /// Longest time of the whole exchange, from its beginning.
    pub deadline: Option<Nanos>,
}

/// Which timeout.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Limit {
    /// The answer is owed for too long.
    Read,
    /// The whole operation took too long.
    Deadline,
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
    /// read timeout's time moves while the program goes on sending.
    pub fn due(&self, wait: Wait) -> Option<Due> {
        let due = |limit, value: Option<Nanos>, since: Nanos| {
            value.map(|value| Due {
                at: since + value,
                limit,
                value,
                since,
            })
        };
        let read = due(Limit::Read, self.read, wait.asked);
        let deadline = due(Limit::Deadline, self.deadline, wait.begun);
        [read, deadline].into_iter().flatten().min_by_key(|d| d.at)
    }

    /// The shortest of them.
    pub fn shortest(&self) -> Option<Nanos> {
        [self.read, self.deadline].into_iter().flatten().min()
    }
}

//! Operations by their attempts, as Prometheus is told of them.
//!
//! An operation under way counts with the attempts that it has had, so one with one attempt becomes one with two.
//! But what Prometheus takes for a counter must never become smaller: it would seem to have begun anew. So each
//! number stays where it was until it is more.

use std::collections::HashMap;

use agent_common::retry::NTH;

use crate::core::RowId;

/// Operations by the number of their attempts, the last of more than that; and all attempts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Operations {
    /// See [`agent_common::Retries::operations`].
    pub by_attempts: [u64; NTH + 1],
    /// See [`agent_common::Retries::all_attempts`].
    pub attempts: u64,
}

impl Operations {
    /// How many have had at most so many attempts.
    fn cumulative(self) -> [u64; NTH + 1] {
        let mut sum = 0;
        self.by_attempts.map(|count| {
            sum += count;
            sum
        })
    }

    /// Of each number the larger one.
    fn or_more(self, other: Self) -> Self {
        let (one, two) = (self.cumulative(), other.cumulative());
        let mut below = 0;
        let mut by_attempts = [0; NTH + 1];
        for (to, most) in by_attempts
            .iter_mut()
            .zip(one.into_iter().zip(two).map(|(a, b)| a.max(b)))
        {
            *to = most - below;
            below = most;
        }
        Self {
            by_attempts,
            attempts: self.attempts.max(other.attempts),
        }
    }
}

/// What was told last.
#[derive(Default)]
pub struct Told {
    /// Of rows without retries, by index: their attempts, each an operation of its own.
    single: Vec<u64>,
    /// Of the others.
    retried: HashMap<RowId, Operations>,
}

impl Told {
    /// What to tell of a row of which this is known.
    pub fn next(&mut self, row: RowId, known: Operations) -> Operations {
        let index = row.index as usize;
        let single = self.single.get(index).copied().unwrap_or_default();
        if !self.retried.contains_key(&row) && known.by_attempts[0] == known.attempts {
            if self.single.len() <= index {
                self.single.resize(index + 1, 0);
            }
            self.single[index] = known.attempts.max(single);
        }
        let before = self.retried.get(&row).copied().unwrap_or_else(|| {
            let mut by_attempts = [0; NTH + 1];
            by_attempts[0] = single;
            Operations {
                by_attempts,
                attempts: single,
            }
        });
        let next = known.or_more(before);
        if next.by_attempts[0] != next.attempts {
            self.retried.insert(row, next);
        }
        next
    }

    /// Forgets a row.
    pub fn forget(&mut self, row: RowId) {
        if let Some(single) = self.single.get_mut(row.index as usize) {
            *single = 0;
        }
        self.retried.remove(&row);
    }
}

#[cfg(test)]
mod tests {
    use agent_common::Retries;
    use bytemuck::Zeroable;
    use proptest::prelude::*;

    use super::*;

    const ROW: RowId = RowId {
        index: 3,
        incarnation: 1,
    };

    proptest! {
        /// Whatever is retried between two looks, and however late a retry is known to be one.
        #[test]
        fn no_number_ever_becomes_smaller(
            steps in prop::collection::vec((0_u64..5, prop::collection::vec(0_usize..NTH, 0..3)), 1..200),
        ) {
            let (mut told, mut retries) = (Told::default(), Retries::zeroed());
            let (mut attempts, mut before) = (0, Operations::default());
            for (dials, known) in steps {
                attempts += dials;
                for nth in known {
                    // No more than have dialled.
                    if retries.total() < attempts {
                        retries.nth[nth] += 1;
                    }
                }
                let now = Operations { by_attempts: retries.operations(attempts), attempts };
                let next = told.next(ROW, now);
                prop_assert_eq!(next.attempts, attempts);
                let (was, is) = (before.cumulative(), next.cumulative());
                prop_assert!(was.iter().zip(is).all(|(was, is)| *was <= is), "{was:?} {is:?}");
                let known = now.cumulative();
                prop_assert!(known.iter().zip(is).all(|(known, is)| *known <= is));
                before = next;
            }
        }
    }

    #[test]
    fn what_nobody_has_retried_is_told_as_it_is() {
        let mut told = Told::default();
        let single = |attempts| Operations {
            by_attempts: [attempts, 0, 0, 0, 0],
            attempts,
        };
        assert_eq!(told.next(ROW, single(7)), single(7));
        assert_eq!(told.next(ROW, single(9)), single(9));
        assert!(told.retried.is_empty());
        // One of them was tried again: nine there were, nine there are.
        let retried = Operations {
            by_attempts: [8, 1, 0, 0, 0],
            attempts: 10,
        };
        let next = told.next(ROW, retried);
        assert_eq!((next.by_attempts, next.attempts), ([9, 0, 0, 0, 0], 10));
        let more = Operations {
            by_attempts: [20, 1, 0, 0, 0],
            attempts: 22,
        };
        assert_eq!(told.next(ROW, more), more);
        told.forget(ROW);
        assert_eq!(told.next(ROW, single(1)), single(1));
    }
}

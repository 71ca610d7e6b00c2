//! What the kernel does with connects and calls of one row, for virtual clocks.

use agent_common::verdict::{
    STATE_FORCED_OPEN, STATE_HALF_OPEN, STATE_OPEN, STATE_RAMP, VERDICT_PROBE_BY_EXCHANGE,
    pack_probe_slots, unpack_probe_slots,
};
use agent_common::window::{SLOTS, encode, repaired, slot};
use agent_common::{CallWindow, Verdict, ramp};

use crate::core::{Event, Nanos, RowId, WindowKind};

/// One row of the kernel's table: its verdict and its two rings of calls.
pub struct Shadow {
    verdict: Verdict,
    until: Nanos,
    slots: u64,
    probe_limit: u32,
    rings: [Ring; 2],
}

struct Ring {
    window: CallWindow,
    last_seq: u64,
}

/// What a connect that passed takes along.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stamp {
    /// Generation of the verdict under which it began.
    pub generation: u32,
    /// It holds a probe slot.
    pub probe: bool,
    /// It is a probe that ends with its first exchange.
    pub by_exchange: bool,
}

impl Default for Shadow {
    fn default() -> Self {
        let ring = || Ring {
            window: CallWindow {
                entries: [0; SLOTS],
            },
            last_seq: 0,
        };
        Self {
            verdict: Verdict::default(),
            until: Nanos::ZERO,
            slots: 0,
            probe_limit: 1,
            rings: [ring(), ring()],
        }
    }
}

impl Shadow {
    /// Generation of the verdict in force.
    pub fn generation(&self) -> u32 {
        self.verdict.generation
    }

    /// Whether some connects are refused now.
    pub fn refuses(&self, now: Nanos) -> bool {
        let refusing = [STATE_OPEN, STATE_FORCED_OPEN, STATE_HALF_OPEN, STATE_RAMP];
        now < self.until && refusing.contains(&self.verdict.state)
    }

    /// Numbers of the last calls: connects, exchanges.
    pub fn last_seqs(&self) -> [u64; 2] {
        [self.rings[0].last_seq, self.rings[1].last_seq]
    }

    /// Writes a verdict ([`Action::SetVerdict`](crate::core::Action::SetVerdict)).
    pub fn set(&mut self, verdict: Verdict, until: Nanos, probe_limit: u32) {
        if matches!(verdict.state, STATE_HALF_OPEN | STATE_RAMP) {
            self.slots = pack_probe_slots(verdict.generation, 0);
        }
        self.probe_limit = probe_limit;
        self.until = until;
        self.verdict = verdict;
    }

    /// Decides about a connect; `None`: refused. `draw` is uniform, for the ramp's shares.
    pub fn admit(&mut self, now: Nanos, draw: u64) -> Option<Stamp> {
        let verdict = self.verdict;
        let left = (self.until - now).0;
        let mut probe = false;
        let passes = match verdict.state {
            STATE_OPEN | STATE_FORCED_OPEN => left == 0,
            STATE_HALF_OPEN | STATE_RAMP if left != 0 => {
                let ramp = verdict.state == STATE_RAMP;
                let limit = if ramp {
                    ramp::floor(left)
                } else {
                    self.probe_limit
                };
                let (generation, taken) = unpack_probe_slots(self.slots);
                let claimed = generation == verdict.generation && taken < limit;
                if claimed {
                    self.slots = pack_probe_slots(generation, taken + 1);
                    probe = !ramp;
                }
                claimed || (ramp && draw % 100 < u64::from(ramp::share(left)))
            }
            _ => true,
        };
        passes.then_some(Stamp {
            generation: verdict.generation,
            probe,
            by_exchange: probe && verdict.flags & VERDICT_PROBE_BY_EXCHANGE != 0,
        })
    }

    /// Gives the slot back of a probe that says nothing, if it is of the verdict's own round.
    pub fn give_back(&mut self, stamp: Stamp) {
        let (generation, taken) = unpack_probe_slots(self.slots);
        if stamp.probe && generation == stamp.generation && taken > 0 {
            self.slots = pack_probe_slots(generation, taken - 1);
        }
    }

    /// Enters a call that began under that generation; its number, unless the verdict is another one
    /// by now. Nothing is entered into no window.
    pub fn enter(
        &mut self,
        kind: WindowKind,
        generation: u32,
        at: Nanos,
        failed: bool,
        slow: bool,
    ) -> Option<u64> {
        let ring = &mut self.rings[kind.index()?];
        if generation != self.verdict.generation {
            return None;
        }
        ring.last_seq += 1;
        let seq = ring.last_seq;
        ring.window.entries[slot(seq)] = encode(seq, at.0, failed, slow);
        Some(seq)
    }

    /// Takes numbers for calls of which nothing is known; no more of them than matter.
    pub fn enter_unknown(&mut self, kind: WindowKind, count: u64) {
        let Some(index) = kind.index() else { return };
        for _ in 0..count.min(SLOTS as u64) {
            let ring = &mut self.rings[index];
            ring.last_seq += 1;
            ring.window.entries[slot(ring.last_seq)] = 0;
        }
    }

    /// A call that was entered as failed has turned out well.
    pub fn repair(&mut self, kind: WindowKind, seq: u64) {
        let Some(index) = kind.index() else { return };
        let entry = &mut self.rings[index].window.entries[slot(seq)];
        if let Some(better) = repaired(*entry, seq, false) {
            *entry = better;
        }
    }

    /// The hint that something failed.
    pub fn calls(&self, row: RowId, kind: WindowKind) -> Option<Event<'_>> {
        let ring = &self.rings[kind.index()?];
        Some(Event::Calls {
            row,
            kind,
            last_seq: ring.last_seq,
            window: &ring.window,
        })
    }
}

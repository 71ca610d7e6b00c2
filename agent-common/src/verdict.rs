//! What the kernel does with a `connect()` to a row's destination.

/// A verdict packed into the one 64-bit word that the connect hook reads, so that it is never seen
/// half written: generation (high 32 bits), errno (16), state (8), flags (8, low).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Verdict {
    /// Raised by one with every verdict of a row. Outcomes carry the generation under which they
    /// began; those of an older one are counted but are no longer part of the window.
    pub generation: u32,
    /// The errno a refused `connect()` ends with (Linux numbers, positive).
    pub errno: u16,
    /// One of the `STATE_` constants; anything else lets the connection pass.
    pub state: u8,
    /// `VERDICT_` flags.
    pub flags: u8,
}

/// Half-open: a probe ends with its first exchange, not with its connect (the breaker opened on
/// exchanges). A connect that fails ends it, too.
pub const VERDICT_PROBE_BY_EXCHANGE: u8 = 1;

/// Every connect passes.
pub const STATE_CLOSED: u8 = 0;
/// Connects are refused until [`crate::Row::verdict_until_ns`].
pub const STATE_OPEN: u8 = 1;
/// As many connects as there are probe slots pass, the others are refused.
pub const STATE_HALF_OPEN: u8 = 2;
/// Refused because an operator said so. For the kernel the same as open.
pub const STATE_FORCED_OPEN: u8 = 3;
/// Every connect passes because an operator said so.
pub const STATE_FORCED_CLOSED: u8 = 4;
/// Closed a moment ago: a growing share of the connects passes until
/// [`crate::Row::verdict_until_ns`], from then on all ([`crate::ramp`]). What passes is judged like
/// any call.
pub const STATE_RAMP: u8 = 5;

impl Verdict {
    /// The packed word.
    #[inline(always)]
    pub const fn pack(self) -> u64 {
        ((self.generation as u64) << 32)
            | ((self.errno as u64) << 16)
            | ((self.state as u64) << 8)
            | self.flags as u64
    }

    /// The verdict in a packed word. Every word is a verdict; unknown states pass.
    #[inline(always)]
    pub const fn unpack(word: u64) -> Self {
        Self {
            generation: (word >> 32) as u32,
            errno: (word >> 16) as u16,
            state: (word >> 8) as u8,
            flags: word as u8,
        }
    }
}

/// Probe slots packed into one word: generation (high 32 bits) and slots taken (low 32 bits).
///
/// The agent writes the word before it writes a half-open verdict of the same generation; the
/// kernel claims and returns slots by compare-and-exchange, and only while the generation is the
/// one of the claim. A slot of an older generation can therefore never be returned twice, nor into
/// a newer one.
#[inline(always)]
pub const fn pack_probe_slots(generation: u32, taken: u32) -> u64 {
    ((generation as u64) << 32) | taken as u64
}

/// Generation and number of slots taken, from [`pack_probe_slots`].
#[inline(always)]
pub const fn unpack_probe_slots(word: u64) -> (u32, u32) {
    ((word >> 32) as u32, word as u32)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn verdict_survives_packing(generation: u32, errno: u16, state: u8, flags: u8) {
            let verdict = Verdict { generation, errno, state, flags };
            prop_assert_eq!(Verdict::unpack(verdict.pack()), verdict);
        }

        #[test]
        fn probe_slots_survive_packing(generation: u32, taken: u32) {
            prop_assert_eq!(unpack_probe_slots(pack_probe_slots(generation, taken)), (generation, taken));
        }
    }
}

//! Which statuses of HTTP a policy takes for failures.

use bytemuck::{Pod, Zeroable};

use crate::layout;

/// The lowest status that can be a failure.
pub const LOWEST: u32 = 400;
/// The highest one.
pub const HIGHEST: u32 = 599;

/// What a server of another protocol says by an answer that it cannot serve: HTTP's "service unavailable".
pub const UNAVAILABLE: u32 = 503;
/// What it says by an answer that asks for fewer calls: HTTP's "too many requests".
pub const TOO_MANY: u32 = 429;

/// A set of statuses from [`LOWEST`] to [`HIGHEST`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Statuses {
    /// A bit for each, from [`LOWEST`] on.
    pub bits: [u64; 4],
}

layout!(Statuses, size 32, bits at 0);

impl Statuses {
    /// Adds one; what is out of range is left out.
    pub fn insert(&mut self, status: u32) {
        if let Some((word, bit)) = place(status) {
            self.bits[word as usize & 3] |= bit;
        }
    }

    /// Whether it is among them.
    #[inline(always)]
    pub fn contains(&self, status: u32) -> bool {
        let [first, second, third, fourth] = self.bits;
        place(status).is_some_and(|(word, bit)| {
            let bits = match word {
                0 => first,
                1 => second,
                2 => third,
                _ => fourth,
            };
            bits & bit != 0
        })
    }
}

/// Where its bit lies: which word, and which of its bits.
#[inline(always)]
const fn place(status: u32) -> Option<(u32, u64)> {
    let at = status.wrapping_sub(LOWEST);
    if at > HIGHEST - LOWEST {
        return None;
    }
    Some((at / 64, 1 << (at % 64)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_has_what_was_put_in() {
        for status in 0..1000 {
            let mut one = Statuses::default();
            one.insert(status);
            let is_one = (LOWEST..=HIGHEST).contains(&status);
            assert_eq!(one == Statuses::default(), !is_one);
            for other in 0..1000 {
                assert_eq!(one.contains(other), is_one && other == status);
            }
        }
        assert!(!Statuses::default().contains(u32::MAX));
    }
}

//! Bulkheads: how many connections may live, how many SYNs may wait, how many connects a second pass.
//!
//! What lives and what waits stands in one word, so that both are claimed at once. The rate is a token
//! bucket kept as one time (the generic cell rate algorithm): when the last token that was taken is
//! earned back. A bucket holds what a second earns, so from rest a whole second's connects may come at
//! once. All of it is in integers; where they do not divide evenly, fewer pass, never more.

/// In the word: one live connection (low half).
pub const ONE_LIVE: u64 = 1;

/// In the word: one connect without an answer (high half).
pub const ONE_PENDING: u64 = 1 << 32;

/// What a connect that begins adds.
pub const ONE_BEGUN: u64 = ONE_LIVE | ONE_PENDING;

/// Live connections, from the word. They count from the SYN on.
#[inline(always)]
pub const fn live(word: u64) -> u32 {
    word as u32
}

/// Connects without an answer, from the word.
#[inline(always)]
pub const fn pending(word: u64) -> u32 {
    (word >> 32) as u32
}

/// Whether one more connect may begin; a limit of 0 is none.
#[inline(always)]
pub const fn has_room(word: u64, connections: u32, pending_most: u32) -> bool {
    (connections == 0 || live(word) < connections)
        && (pending_most == 0 || pending(word) < pending_most)
}

const SECOND: u64 = 1_000_000_000;

/// Time in which one token is earned, ns, rounded up. `per_second` must not be 0, here and below.
#[inline(always)]
pub const fn earned_in(per_second: u32) -> u64 {
    SECOND.div_ceil(per_second as u64)
}

/// Whether the bucket has a token at `now` (ns). One that is taken raises it to `now`, if it lies
/// before, and then by [`earned_in`]. The kernel does the two one after the other.
#[inline(always)]
pub const fn has_token(bucket: u64, now: u64, per_second: u32) -> bool {
    bucket.saturating_sub(now) <= earned_in(per_second) * (per_second as u64 - 1)
}

/// Tokens that are not earned back yet at `now`; at most `per_second`.
pub const fn taken(bucket: u64, now: u64, per_second: u32) -> u32 {
    if per_second == 0 {
        return 0;
    }
    let count = bucket.saturating_sub(now).div_ceil(earned_in(per_second));
    if count > per_second as u64 {
        per_second
    } else {
        count as u32
    }
}

#[cfg(test)]
mod tests {
    extern crate std;
    use super::*;
    use proptest::prelude::*;
    use std::vec::Vec;

    /// Takes a token: the bucket's new word, 0 when there is none to take.
    fn take(bucket: u64, now: u64, per_second: u32) -> u64 {
        if !has_token(bucket, now, per_second) {
            return 0;
        }
        bucket.max(now).saturating_add(earned_in(per_second))
    }

    /// A bucket as one would write it with floats.
    struct Model {
        tokens: f64,
        at: u64,
    }

    impl Model {
        /// Tokens at that time.
        fn at(&mut self, now: u64, per_second: u32) -> f64 {
            let earned = (now - self.at) as f64 / earned_in(per_second) as f64;
            self.tokens = (self.tokens + earned).min(f64::from(per_second));
            self.at = now;
            self.tokens
        }
    }

    #[test]
    fn the_ends_of_time() {
        assert_eq!(take(0, u64::MAX, 1), u64::MAX);
        // A bucket that time has not reached (it never goes back, but who knows) gives nothing.
        assert_eq!(take(u64::MAX, 0, 10), 0);
        assert_eq!(taken(u64::MAX, 0, 10), 10);
        assert_eq!(taken(0, u64::MAX, 10), 0);
        assert_eq!(taken(5, 0, 0), 0);
        // One a second: the next one exactly a second later.
        let word = take(0, 7, 1);
        assert_eq!(take(word, 6 + SECOND, 1), 0);
        assert_ne!(take(word, 7 + SECOND, 1), 0);
    }

    #[test]
    fn each_limit_holds_by_itself() {
        let word = 3 * ONE_LIVE + 2 * ONE_PENDING;
        assert_eq!((live(word), pending(word)), (3, 2));
        assert!(has_room(word, 0, 0) && has_room(word, 4, 3));
        assert!(!has_room(word, 3, 3) && !has_room(word, 4, 2) && !has_room(word, 0, 1));
        // Lowered below what is there.
        assert!(!has_room(word, 1, 0));
    }

    proptest! {
        #[test]
        fn as_a_bucket_of_floats(
            per_second in prop_oneof![1_u32..50, 1_u32..=10_000_000],
            start in 0_u64..u64::MAX / 2,
            waits in prop::collection::vec(prop_oneof![
                Just(0_u64), 0_u64..1000, 0_u64..3_000_000, 0_u64..2 * SECOND,
            ], 1..400),
        ) {
            let (mut word, mut now) = (0, start);
            let mut model = Model { tokens: f64::from(per_second), at: start };
            for wait in waits {
                now += wait;
                let tokens = model.at(now, per_second);
                let left = per_second - taken(word, now, per_second);
                // Floats are off by a hair.
                prop_assert!((f64::from(left) - tokens.floor()).abs() <= 1.0);
                let next = take(word, now, per_second);
                if (tokens - 1.0).abs() > 1e-6 {
                    prop_assert_eq!(next != 0, tokens > 1.0, "{} tokens", tokens);
                }
                if next != 0 {
                    word = next;
                    model.tokens = (tokens - 1.0).max(0.0);
                }
            }
        }

        #[test]
        fn never_one_too_many(
            per_second in 1_u32..200,
            start: u32,
            waits in prop::collection::vec(0_u64..30_000_000, 1..600),
        ) {
            let (mut word, mut now) = (0, u64::from(start));
            let mut passed = Vec::new();
            for wait in waits {
                now += wait;
                let next = take(word, now, per_second);
                if next != 0 {
                    word = next;
                    passed.push(now);
                }
            }
            // In whatever stretch of time: a bucket full, and what it earns meanwhile.
            for (from, first) in passed.iter().enumerate() {
                for (to, last) in passed.iter().enumerate().skip(from) {
                    let count = (to - from + 1) as u64;
                    let earned = (last - first) * u64::from(per_second) / SECOND;
                    prop_assert!(count <= u64::from(per_second) + earned);
                }
            }
        }

        #[test]
        fn any_words(bucket: u64, now: u64, per_second in 1_u32.., live: u64, a: u32, b: u32) {
            let next = take(bucket, now, per_second);
            prop_assert!(next == 0 || next >= bucket && next >= now);
            prop_assert!(taken(bucket, now, per_second) <= per_second);
            if has_room(live, a, b) {
                prop_assert!(has_room(live, 0, b) && has_room(live, a, 0));
            }
        }
    }
}

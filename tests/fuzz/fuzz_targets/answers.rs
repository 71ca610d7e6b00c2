//! DNS answers, as whoever answers programs sends them.
#![no_main]

use backstop::hosts::answer::{MOST_ADDRESSES, MOST_NAMES, decode};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|message: &[u8]| {
    if let Some(answer) = decode(message) {
        assert!((1..=MOST_ADDRESSES).contains(&answer.addresses.len()));
        assert!((1..=MOST_NAMES).contains(&answer.names.len()));
        for name in &answer.names {
            assert!(name.len() <= 253 && name.chars().all(|c| c.is_ascii_graphic()), "{name:?}");
        }
    }
});

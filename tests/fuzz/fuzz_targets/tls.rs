//! What TLS records are taken for: any records, in any order, cut into segments anyhow.
#![no_main]

use agent_common::tls::{self, SEEN_SETTLED, STAGE_SETTLED, Sent};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let (mut stage, mut seen, mut known) = (tls::STAGE_HELLO, 0, 0);
    let mut may_be_owed = false;
    for step in data.chunks_exact(8) {
        let Some(record) = tls::record(&[step[0], step[1], step[2], step[3], step[4]]) else {
            continue;
        };
        let (next, what) = tls::sent(stage, record, step[5] & 1 != 0);
        assert!(next <= STAGE_SETTLED);
        // It never goes back, but for the second hello.
        assert!(next >= stage || (next, what) == (tls::STAGE_HELLO, Sent::Handshake));
        stage = next;
        may_be_owed |= what == Sent::Request;
        let is_owed = may_be_owed && step[5] & 2 != 0;
        let next_length = u32::from(u16::from_le_bytes([step[6], step[7]]));
        let before = (seen, known);
        let is = tls::received(seen, known, record, next_length, is_owed);
        assert!(is_owed || !is.is_answer);
        assert!(tls::known_count(is.known) >= tls::known_count(known));
        assert!(tls::known_count(is.known) <= 8);
        if before.0 & SEEN_SETTLED != 0 {
            // Nothing is learned any more, and all data answers.
            assert_eq!(is.known, known);
            assert_eq!(is.is_answer, is_owed && record.is_data());
        }
        (seen, known) = (is.seen, is.known);
        let _ = tls::shows_tickets(before.0, seen);
    }
});

//! The classifier of first bytes, as the kernel calls it: a protocol, a length, a payload.
#![no_main]

use agent_common::classify::{self, Answer, HEAD, RetryAfter};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let Some((&[of, a, b, c, d], payload)) = data.split_first_chunk() else {
        return;
    };
    let protocol = u32::from(of % 8);
    let mut head = [0; HEAD];
    let real = payload.len().min(HEAD);
    head[..real].copy_from_slice(&payload[..real]);
    // What a segment's header says need not be what is there.
    for length in [
        payload.len() as u32,
        u32::from_le_bytes([a, b, c, d]),
        5,
    ] {
        let first = classify::protocol(&head, length as usize);
        assert!(first != 0 && first < 8, "{first}");
        let answer = classify::answer(&head, protocol, length);
        assert!(answer != Answer::UnavailableForNow);
        assert!(!(answer.is_failure() && answer.is_throttled()));
        if protocol > classify::LAST_WITH_STATUS {
            assert_eq!(answer, Answer::Plain);
        }
        let _ = classify::begins_tls(&head, length);
        assert!(!classify::is_farewell(&head, length) || classify::may_be_farewell(length));
    }
    let _ = classify::begins_stream(&head);
    let _ = classify::begins_amqp(&head);
    let _ = classify::begins_http_request(&head);
    assert!(!(classify::is_tls_request(&head) && classify::is_tls_alert(&head)));
    let mut search = RetryAfter::default();
    let found = payload.iter().find_map(|byte| search.step(*byte));
    if found == Some(true) {
        let text = payload.to_ascii_lowercase();
        let name = text.windows(8).any(|window| {
            window
                .iter()
                .map(|byte| byte | 0x20)
                .eq(b"y-after:".iter().copied())
        });
        assert!(name);
    }
});

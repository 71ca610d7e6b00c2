//! The classifier of first bytes, as the kernel calls it: a protocol, a length, a payload.
#![no_main]

use agent_common::{
    broker,
    classify::{self, HEAD},
    commands,
    http::{self, Search},
    reply::{self, Answer},
    request,
};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let Some((&[of, a, b, c, d], payload)) = data.split_first_chunk() else {
        return;
    };
    let protocol = u32::from(of % 11);
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
        assert!(first != 0 && first < 11, "{first}");
        let answer = reply::answer(&head, protocol, length);
        assert!(answer != Answer::UnavailableForNow);
        assert!(!(answer.is_failure() && answer.is_throttled()));
        if protocol > reply::LAST_WITH_STATUS {
            assert_eq!(answer, Answer::Plain);
        }
        let _ = classify::begins_tls(&head, length);
        assert!(!classify::is_farewell(&head, length) || classify::may_be_farewell(length));
    }
    let _ = classify::begins_stream(&head);
    for of in 0..16 {
        let _ = broker::asks(of, &head, payload.len() as u32, 0);
    }
    let _ = commands::command(&head, payload.len() as u32);
    let _ = classify::begins_http_request(&head);
    assert!(!(classify::is_tls_request(&head) && classify::is_tls_alert(&head)));
    searched(payload);
});

/// The search in the head of an answer, as the kernel does it.
fn searched(payload: &[u8]) {
    let loaded = payload.len().min(http::SEARCHED as usize);
    let mut bytes = [b'\n'; http::WORDS * 8];
    bytes[..loaded].copy_from_slice(&payload[..loaded]);
    let word = |index: u32| {
        let at = index as usize * 8;
        u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
    };
    let mut search = Search::new(loaded as u32);
    for _ in 0..http::STEPS {
        if search.step(word) {
            break;
        }
    }
    let text = payload[..loaded].to_ascii_lowercase();
    let has = |name: &[u8]| {
        // A line, with the bit set that makes letters small.
        let name: Vec<u8> = name.iter().map(|byte| byte | 0x20).collect();
        text.windows(name.len() + 1).any(|window| {
            window[0] == b'\n' && window[1..].iter().map(|byte| byte | 0x20).eq(name.iter().copied())
        })
    };
    assert!(!search.has_retry_after() || has(b"retry-after:"));
    let (sends, length) = {
        let mut value = request::Value::of(&search);
        for _ in 0..request::VALUE {
            if value.step(word) {
                break;
            }
        }
        request::end(&search, &value)
    };
    assert!(sends & !request::SENDS == 0);
    assert!(sends != request::SENDS_LENGTH || (has(b"content-length:") && length > 0));
    for asks in 0..4 {
        let (what, whole) = search.body(word, asks, true);
        assert!(what <= http::BODY_ENDLESS);
        if what == http::BODY_LENGTH {
            assert!(has(b"content-length:") && whole > 0);
        }
    }
}

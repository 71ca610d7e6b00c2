//! The decoder of kernel events, and what it makes of process names.
#![no_main]

use backstop::kernel::events;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let event = events::decode(data);
    assert_eq!(
        event.is_some(),
        data.len() == size_of::<agent_common::Event>()
    );
    if let Some(event) = event {
        let name = events::comm(&event.comm);
        assert!(!name.chars().any(char::is_control));
    }
    assert!(!events::comm(data).chars().any(char::is_control));
});

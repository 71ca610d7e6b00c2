//! What `replay` reads: any bytes are refused or replayed, twice the same.
#![no_main]

use backstop::{policy::Config, replay};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Ok(recording) = replay::read(bytes) else {
        return;
    };
    // A run of millions is allowed, and would only take time here.
    let calls = recording.rows.values().flat_map(|row| &row.windows).flatten();
    if calls.map(|segment| segment.len()).sum::<u64>() > 10_000 {
        return;
    }
    let config = Config::default_config();
    let once = replay::replay(&recording, &config);
    assert_eq!(once, replay::replay(&recording, &config));
});

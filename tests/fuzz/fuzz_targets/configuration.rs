//! Configurations: what is accepted is written out and read again as the same.
#![no_main]

use backstop::policy;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    match policy::parse_str("fuzz.toml", text) {
        Ok(config) => {
            let written = config.to_toml();
            let again = policy::parse_str("again.toml", &written);
            assert!(again.is_ok(), "{written}\n{again:?}");
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
});

//! Durations as they are written in a configuration: `250ms`, `2s`, `1m30s`.

use std::time::Duration;

/// Writes a duration the way it is read, in hours and below, without spaces: `1m30s`. Zero is `0s`;
/// parts of a millisecond are cut off.
pub fn format_duration(duration: Duration) -> String {
    let seconds = duration.as_secs();
    let parts = [
        (seconds / 3600, "h"),
        (seconds / 60 % 60, "m"),
        (seconds % 60, "s"),
        (u64::from(duration.subsec_millis()), "ms"),
    ];
    let written: String = parts
        .iter()
        .filter(|(count, _)| *count > 0)
        .map(|(count, unit)| format!("{count}{unit}"))
        .collect();
    if written.is_empty() {
        "0s".to_owned()
    } else {
        written
    }
}

/// Reads a duration; the error is to be read after the value.
pub(super) fn parse_duration(text: &str) -> Result<Duration, String> {
    if !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(without_unit(text));
    }
    let duration =
        humantime::parse_duration(text).map_err(|error| format!("is no duration ({error})"))?;
    if !duration.subsec_nanos().is_multiple_of(1_000_000) {
        return Err("is not a whole number of milliseconds".to_owned());
    }
    Ok(duration)
}

/// What is wrong with a bare number.
pub(super) fn without_unit(number: &str) -> String {
    format!("is a number without a unit; write it as \"{number}s\"")
}

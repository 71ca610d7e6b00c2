//! Durations as they are written in a configuration, and everywhere else: `250ms`, `2s`, `1m30s`, `365d`.

use std::time::Duration;

const DAY: u64 = 86_400;

/// Writes a duration the way it is read, without spaces: `1m30s`, `24h`, from two days on in days:
/// `365d`. Zero is `0s`; parts of a millisecond are cut off. The one way to write one: months and years
/// are not of one length, and nobody asks for them.
pub fn format_duration(duration: Duration) -> String {
    let seconds = duration.as_secs();
    let days = if seconds < 2 * DAY { 0 } else { seconds / DAY };
    let parts = [
        (days, "d"),
        ((seconds - days * DAY) / 3600, "h"),
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

/// Longest text of a duration, bytes, and most digits in a row: no sum of such numbers comes near 2^64
/// seconds (five of 11 digits are at most, in years of 31,557,600 s: 1.6e19 of 1.8e19), where humantime
/// 2.4 panics (`add_current`: a carry of a whole second).
const LONGEST: usize = 64;
const MOST_DIGITS: usize = 11;

/// Reads a duration of any length; the error is to be read after the value. The one way to do it, for
/// configurations and requests alike.
///
/// # Errors
/// When it is none.
pub fn read_duration(text: &str) -> Result<Duration, String> {
    let is_long = |digits: &str| digits.len() > MOST_DIGITS;
    if text.len() > LONGEST || text.split(|c: char| !c.is_ascii_digit()).any(is_long) {
        return Err("is no duration (it is too long)".to_owned());
    }
    humantime::parse_duration(text).map_err(|error| format!("is no duration ({error})"))
}

/// Reads a duration of a configuration; the error is to be read after the value.
pub(super) fn parse_duration(text: &str) -> Result<Duration, String> {
    if !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(without_unit(text));
    }
    let duration = read_duration(text)?;
    if !duration.subsec_nanos().is_multiple_of(1_000_000) {
        return Err("is not a whole number of milliseconds".to_owned());
    }
    Ok(duration)
}

/// What is wrong with a bare number.
pub(super) fn without_unit(number: &str) -> String {
    format!("is a number without a unit; write it as \"{number}s\"")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_plain_and_reads_as_it_was() {
        for (ms, written) in [
            (0, "0s"),
            (250, "250ms"),
            (90_000, "1m30s"),
            (86_400_000, "24h"),
            (2 * 86_400_000 - 1, "47h59m59s999ms"),
            (2 * 86_400_000, "2d"),
            (365 * 86_400_000, "365d"),
            (31 * 86_400_000 + 3_600_000, "31d1h"),
        ] {
            let duration = Duration::from_millis(ms);
            assert_eq!(format_duration(duration), written);
            assert_eq!(read_duration(written), Ok(duration));
        }
        let century = Duration::from_millis(36_525 * 86_400_000 + 3_723_004);
        assert_eq!(read_duration(&format_duration(century)), Ok(century));
    }

    #[test]
    fn no_text_is_too_much() {
        assert_eq!(read_duration("1h 30m"), Ok(Duration::from_secs(5400)));
        for text in [
            "18446744073709551615s0.5s0.5s".to_owned(),
            "1s".repeat(33),
            "123456789012s".to_owned(),
            "0.000000000001h".to_owned(),
        ] {
            assert!(read_duration(&text).is_err(), "{text}");
        }
        // The most that is looked at is a duration, or an error of its own.
        let most = format!("{}99s", "99999999999y".repeat(5));
        assert!(most.len() <= LONGEST && read_duration(&most).is_ok());
    }
}

//! Numbers, times and names as people read them.

use std::time::Duration;

use crate::{kernel::events::printable, policy::format_duration};

/// `850us`, `1.2ms`, `35ms`, `2.0s`; `-` for nothing.
pub fn micros(us: Option<u64>) -> String {
    let Some(us) = us else {
        return "-".to_owned();
    };
    match us {
        0..1_000 => format!("{us}us"),
        1_000..10_000 => format!("{}.{}ms", us / 1_000, us % 1_000 / 100),
        10_000..1_000_000 => format!("{}ms", us / 1_000),
        _ => format!("{}.{}s", us / 1_000_000, us % 1_000_000 / 100_000),
    }
}

/// The largest unit only, never rounded up: `12s`, `3m`, `2h`, `4d`.
pub fn age(ms: u64) -> String {
    let s = ms / 1_000;
    match s {
        0..60 => format!("{s}s"),
        60..3_600 => format!("{}m", s / 60),
        3_600..86_400 => format!("{}h", s / 3_600),
        _ => format!("{}d", s / 86_400),
    }
}

/// As exact as it is, and as it would be asked for: `250ms`, `2s`, `1h30m`, `365d`.
pub fn exact(ms: u64) -> String {
    format_duration(Duration::from_millis(ms))
}

/// To the second, for times that run: `12s`, `3h12m5s`.
pub fn running(ms: u64) -> String {
    exact(ms / 1_000 * 1_000)
}

/// At most five characters: `950`, `12.3k`, `4.56M`.
pub fn short_count(count: u64) -> String {
    // Cut, not rounded: 9,999 is not yet 10.0k.
    let scaled = |unit: u64, name: char| {
        let hundredths = count / (unit / 100);
        match hundredths {
            0..1_000 => format!("{}.{:02}{name}", hundredths / 100, hundredths % 100),
            1_000..10_000 => format!("{}.{}{name}", hundredths / 100, hundredths % 100 / 10),
            _ => format!("{}{name}", hundredths / 100),
        }
    };
    match count {
        0..10_000 => count.to_string(),
        10_000..1_000_000 => scaled(1_000, 'k'),
        1_000_000..1_000_000_000 => scaled(1_000_000, 'M'),
        _ => scaled(1_000_000_000, 'G'),
    }
}

/// With a comma every three digits: `12,345`.
pub fn count(count: u64) -> String {
    let digits = count.to_string();
    let mut text = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// `1 row`, `12 rows`.
pub fn number(of: u64, what: &str) -> String {
    match of {
        1 => format!("1 {what}"),
        of => format!("{} {what}s", count(of)),
    }
}

/// A name that a program or an administrator chose, made harmless for a terminal: control characters, and
/// those that change the order of a line, become `?`.
pub fn clean(text: &str) -> String {
    text.chars().map(printable).collect()
}

/// At most `width` characters, cut at the left, where paths say least.
pub fn shorten_left(text: &str, width: usize) -> String {
    let length = text.chars().count();
    if length <= width {
        return text.to_owned();
    }
    let kept: String = text
        .chars()
        .skip(length - width.saturating_sub(1))
        .collect();
    format!("…{kept}")
}

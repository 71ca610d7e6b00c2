//! What a single value may be: each rule turns a TOML value into a typed one or complains.

use std::{fmt::Display, ops::RangeInclusive, str::FromStr, time::Duration};

use toml::de::DeValue;

use super::{
    duration::{format_duration, parse_duration, without_unit},
    model::StatusPattern,
    reader::Complaint,
};

type Read<T> = Result<T, Complaint>;

/// A whole number in a range.
pub(super) fn whole(range: RangeInclusive<u32>) -> impl Fn(&DeValue<'_>) -> Read<u32> {
    move |value| {
        let allowed = || format!("a whole number from {} to {}", range.start(), range.end());
        let DeValue::Integer(number) = value else {
            return Err(Complaint::new("must be a whole number", allowed()));
        };
        match u32::from_str_radix(number.as_str(), number.radix()) {
            Ok(number) if range.contains(&number) => Ok(number),
            _ => Err(Complaint::new("is out of range", allowed())),
        }
    }
}

/// A duration in a range.
pub(super) fn duration(range: RangeInclusive<Duration>) -> impl Fn(&DeValue<'_>) -> Read<Duration> {
    move |value| {
        let (min, max) = (
            format_duration(*range.start()),
            format_duration(*range.end()),
        );
        let allowed = || {
            format!("a duration from {min} to {max}, written like \"250ms\", \"2s\" or \"1m30s\"")
        };
        let duration = match value {
            DeValue::String(text) => parse_duration(text),
            DeValue::Integer(number) => Err(without_unit(number.as_str())),
            DeValue::Float(number) => Err(without_unit(number.as_str())),
            _ => Err("must be a duration in quotes".to_owned()),
        };
        match duration {
            Ok(duration) if range.contains(&duration) => Ok(duration),
            Ok(_) => Err(Complaint::new("is out of range", allowed())),
            Err(what) => Err(Complaint::new(what, allowed())),
        }
    }
}

/// Whether a ratio of 0 makes sense.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Zero {
    Allowed,
    Refused,
}

/// A ratio, at most 1.
pub(super) fn ratio(zero: Zero) -> impl Fn(&DeValue<'_>) -> Read<f64> {
    move |value| {
        let allowed = match zero {
            Zero::Allowed => "a number from 0 to 1",
            Zero::Refused => "a number above 0, at most 1",
        };
        let number: Option<f64> = match value {
            DeValue::Integer(number) => number.to_string().parse().ok(),
            DeValue::Float(number) => number.as_str().parse().ok(),
            _ => return Err(Complaint::new("must be a number", allowed)),
        };
        match number {
            Some(number) if number > 0.0 && number <= 1.0 => Ok(number),
            // Also -0.0, which would print its sign.
            Some(0.0) if zero == Zero::Allowed => Ok(0.0),
            _ => Err(Complaint::new("is out of range", allowed)),
        }
    }
}

/// Yes or no.
pub(super) fn boolean(value: &DeValue<'_>) -> Read<bool> {
    match value {
        DeValue::Boolean(value) => Ok(*value),
        _ => Err(Complaint::new(
            "must be true or false, without quotes",
            "true, false",
        )),
    }
}

/// One of a few words.
pub(super) fn one_of<T: Copy>(words: &[(&str, T)]) -> impl Fn(&DeValue<'_>) -> Read<T> {
    move |value| {
        let allowed = || {
            let quoted: Vec<_> = words.iter().map(|(word, _)| format!("{word:?}")).collect();
            quoted.join(", ")
        };
        let DeValue::String(text) = value else {
            return Err(Complaint::new("must be a word in quotes", allowed()));
        };
        match words.iter().find(|(word, _)| word == text) {
            Some((_, meant)) => Ok(*meant),
            None => Err(Complaint::new(
                "is not a word that is known here",
                allowed(),
            )),
        }
    }
}

/// "off", or what `rule` accepts.
pub(super) fn or_off<T>(
    rule: impl Fn(&DeValue<'_>) -> Read<T>,
) -> impl Fn(&DeValue<'_>) -> Read<Option<T>> {
    move |value| {
        if is_off(value) {
            return Ok(None);
        }
        rule(value).map(Some).map_err(|complaint| Complaint {
            allowed: format!("{}, or \"off\"", complaint.allowed),
            ..complaint
        })
    }
}

/// Whether a value is the word "off".
pub(super) fn is_off(value: &DeValue<'_>) -> bool {
    matches!(value, DeValue::String(text) if text == "off")
}

/// Text that parses to `T`, whose error reads well after the value.
pub(super) fn parsed<T>(allowed: &str) -> impl Fn(&DeValue<'_>) -> Read<T>
where
    T: FromStr<Err: Display>,
{
    move |value| {
        let DeValue::String(text) = value else {
            return Err(Complaint::new("must be text in quotes", allowed));
        };
        text.parse()
            .map_err(|error: T::Err| Complaint::new(error.to_string(), allowed))
    }
}

/// What [`status`] accepts.
pub(super) const STATUS_ALLOWED: &str = "\"4xx\", \"5xx\", or a status from 400 to 599";

/// A status that counts as a failure.
pub(super) fn status(value: &DeValue<'_>) -> Read<StatusPattern> {
    let code = match value {
        DeValue::String(text) if text == "4xx" => return Ok(StatusPattern::Class(4)),
        DeValue::String(text) if text == "5xx" => return Ok(StatusPattern::Class(5)),
        DeValue::String(text) => text.parse().ok(),
        DeValue::Integer(number) => u16::from_str_radix(number.as_str(), number.radix()).ok(),
        _ => None,
    };
    match code {
        Some(code @ 400..=599) => Ok(StatusPattern::Code(code)),
        _ => Err(Complaint::new(
            "is no status that can count as a failure",
            STATUS_ALLOWED,
        )),
    }
}

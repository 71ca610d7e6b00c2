//! A policy's settings as text, under the keys of the file.

use std::{fmt, time::Duration};

use super::{
    duration::format_duration,
    model::{Hung, LogFormat, Mode, OnOpen, Policy, ReadAction, Scope, StatusPattern},
};

/// Word for a threshold that is off.
pub(super) const OFF: &str = "off";

impl Policy {
    /// Every setting under its key in the file, with its value as text, in the order of
    /// `config/default.toml`. `breaker` and `retry` themselves are `on` or `off`.
    pub fn settings(&self) -> Vec<(&'static str, String)> {
        let Self {
            timeouts: t,
            breaker: b,
            retry: r,
            limits: l,
            ..
        } = self;
        vec![
            ("timeouts.connect", format_duration(t.connect)),
            ("timeouts.read", wait(t.read)),
            ("timeouts.write", wait(t.write)),
            ("timeouts.deadline", wait(t.deadline)),
            ("timeouts.stall", wait(t.stall)),
            ("timeouts.keepalive", wait(t.keepalive)),
            ("timeouts.read_action", t.read_action.to_string()),
            ("breaker", on_off(b.enabled)),
            ("breaker.failure_rate", number(b.failure_rate)),
            ("breaker.window", b.window.to_string()),
            ("breaker.window_age", format_duration(b.window_age)),
            ("breaker.min_calls", b.min_calls.to_string()),
            (
                "breaker.consecutive_failures",
                number(b.consecutive_failures),
            ),
            ("breaker.slow_call", wait(b.slow_call)),
            ("breaker.slow_call_rate", number(b.slow_call_rate)),
            ("breaker.hung", b.hung.to_string()),
            ("breaker.gave_up", wait(b.gave_up)),
            ("breaker.scope", b.scope.to_string()),
            ("breaker.cooldown", format_duration(b.cooldown)),
            ("breaker.cooldown_max", format_duration(b.cooldown_max)),
            ("breaker.redial", b.redial.to_string()),
            ("breaker.probes", b.probes.to_string()),
            (
                "breaker.successes_to_close",
                b.successes_to_close.to_string(),
            ),
            ("breaker.max_open_share", number(b.max_open_share)),
            ("breaker.failure_status", list_or_off(&b.failure_status)),
            ("breaker.on_open", b.on_open.to_string()),
            ("breaker.errno", b.errno.as_str().to_owned()),
            ("retry", on_off(r.enabled)),
            ("retry.limit", number(r.limit)),
            ("retry.budget", number(r.budget)),
            ("retry.window", format_duration(r.window)),
            ("retry.min_per_second", r.min_per_second.to_string()),
            (
                "retry.backoff",
                r.backoff.map_or(OFF.to_owned(), |backoff| {
                    let (base, max) = (format_duration(backoff.base), format_duration(backoff.max));
                    format!("{base} to {max}")
                }),
            ),
            ("retry.max_held", r.max_held.to_string()),
            ("retry.spin_per_second", number(r.spin_per_second)),
            (
                "retry.refuse_non_idempotent",
                r.refuse_non_idempotent.to_string(),
            ),
            ("limits.connections", number(l.connections)),
            ("limits.pending", number(l.pending)),
            ("limits.connects_per_second", number(l.connects_per_second)),
        ]
    }
}

fn wait(duration: Option<Duration>) -> String {
    duration.map_or(OFF.to_owned(), format_duration)
}

fn number(value: Option<impl fmt::Display>) -> String {
    value.map_or(OFF.to_owned(), |value| value.to_string())
}

fn on_off(on: bool) -> String {
    if on { "on" } else { OFF }.to_owned()
}

fn list_or_off(values: &[impl fmt::Display]) -> String {
    if values.is_empty() {
        OFF.to_owned()
    } else {
        list(values)
    }
}

pub(super) fn list(values: &[impl fmt::Display]) -> String {
    values
        .iter()
        .map(ToString::to_string)
        .collect::<Vec<_>>()
        .join(", ")
}

/// Displays as the words of the file.
macro_rules! words {
    ($type:ty { $($value:pat => $word:literal),+ $(,)? }) => {
        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(match self { $($value => $word),+ })
            }
        }
    };
}

words!(Mode { Self::Enforce => "enforce", Self::Observe => "observe" });
words!(ReadAction { Self::Abort => "abort", Self::Option => "option" });
words!(Scope { Self::Workload => "workload", Self::Node => "node" });
words!(OnOpen { Self::Keep => "keep", Self::DrainIdle => "drain-idle", Self::Abort => "abort" });
words!(LogFormat { Self::Text => "text", Self::Json => "json" });

impl fmt::Display for Hung {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Off => f.write_str(OFF),
            Self::After(after) => f.write_str(&format_duration(*after)),
        }
    }
}

impl fmt::Display for StatusPattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Class(class) => write!(f, "{class}xx"),
            Self::Code(code) => write!(f, "{code}"),
        }
    }
}
impl super::Config { /// tmp
 pub fn to_toml(&self) -> String { String::new() } }

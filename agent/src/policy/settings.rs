//! A policy's settings as text, under the keys of the file.

use std::{fmt, time::Duration};

use super::{
    duration::format_duration,
    model::{
        Backoff, Hung, LogFormat, Mode, OnOpen, Policy, ReadAction, Scope, Stall, StatusPattern,
    },
};

/// Word for a threshold that is off.
pub(super) const OFF: &str = "off";

/// A setting's value. Displays for people, without the quotes and brackets of a file.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Value {
    /// A whole section that is on or off.
    Switch(bool),
    /// A word or a duration: in quotes in a file.
    Word(String),
    /// A number or a boolean: the same in a file.
    Bare(String),
    /// Statuses that count as failures; never empty.
    Statuses(Vec<StatusPattern>),
    /// Waits before retries.
    Backoff(Backoff),
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Switch(on) => f.write_str(if *on { "on" } else { OFF }),
            Self::Word(text) | Self::Bare(text) => f.write_str(text),
            Self::Statuses(statuses) => f.write_str(&list(statuses)),
            Self::Backoff(Backoff { base, max }) => {
                write!(f, "{} to {}", format_duration(*base), format_duration(*max))
            }
        }
    }
}

impl Policy {
    /// Every setting under its key in the file, with its value as text, in the order of
    /// `config/default.toml`. `breaker` and `retry` themselves are `on` or `off`.
    pub fn settings(&self) -> Vec<(&'static str, String)> {
        let values = self.values().into_iter();
        values
            .map(|(key, value)| (key, value.to_string()))
            .collect()
    }

    /// The same with values that can also be written into a file.
    pub(super) fn values(&self) -> Vec<(&'static str, Value)> {
        let Self {
            timeouts: t,
            breaker: b,
            retry: r,
            limits: l,
            ..
        } = self;
        vec![
            ("timeouts.connect", duration(t.connect)),
            ("timeouts.read", wait(t.read)),
            ("timeouts.write", wait(t.write)),
            ("timeouts.deadline", wait(t.deadline)),
            ("timeouts.stall", word(t.stall)),
            ("timeouts.keepalive", wait(t.keepalive)),
            ("timeouts.read_action", word(t.read_action)),
            ("breaker", Value::Switch(b.enabled)),
            ("breaker.failure_rate", number(b.failure_rate)),
            ("breaker.window", bare(b.window)),
            ("breaker.window_age", duration(b.window_age)),
            ("breaker.min_calls", bare(b.min_calls)),
            (
                "breaker.consecutive_failures",
                number(b.consecutive_failures),
            ),
            ("breaker.slow_call", wait(b.slow_call)),
            ("breaker.slow_call_rate", number(b.slow_call_rate)),
            ("breaker.hung", word(b.hung)),
            ("breaker.gave_up", wait(b.gave_up)),
            ("breaker.scope", word(b.scope)),
            ("breaker.cooldown", duration(b.cooldown)),
            ("breaker.cooldown_max", duration(b.cooldown_max)),
            ("breaker.redial", bare(b.redial)),
            ("breaker.probes", bare(b.probes)),
            ("breaker.successes_to_close", bare(b.successes_to_close)),
            ("breaker.max_open_share", number(b.max_open_share)),
            ("breaker.failure_status", statuses(&b.failure_status)),
            ("breaker.on_open", word(b.on_open)),
            ("breaker.errno", word(b.errno.as_str())),
            ("retry", Value::Switch(r.enabled)),
            ("retry.limit", number(r.limit)),
            ("retry.budget", number(r.budget)),
            ("retry.window", duration(r.window)),
            ("retry.min_per_second", bare(r.min_per_second)),
            ("retry.backoff", r.backoff.map_or(word(OFF), Value::Backoff)),
            ("retry.max_held", bare(r.max_held)),
            ("retry.spin_per_second", number(r.spin_per_second)),
            ("retry.refuse_non_idempotent", bare(r.refuse_non_idempotent)),
            ("limits.connections", number(l.connections)),
            ("limits.pending", number(l.pending)),
            ("limits.connects_per_second", number(l.connects_per_second)),
        ]
    }
}

fn word(word: impl fmt::Display) -> Value {
    Value::Word(word.to_string())
}

fn bare(value: impl fmt::Display) -> Value {
    Value::Bare(value.to_string())
}

fn duration(duration: Duration) -> Value {
    Value::Word(format_duration(duration))
}

fn wait(wait: Option<Duration>) -> Value {
    wait.map_or(word(OFF), duration)
}

fn number(value: Option<impl fmt::Display>) -> Value {
    value.map_or(word(OFF), bare)
}

fn statuses(statuses: &[StatusPattern]) -> Value {
    if statuses.is_empty() {
        word(OFF)
    } else {
        Value::Statuses(statuses.to_vec())
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

impl fmt::Display for Stall {
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

//! Writes a whole configuration as a file.

use std::{fmt::Display, fmt::Write as _};

use super::{
    duration::format_duration,
    model::{BreakerPolicy, Config, Policy, RetryPolicy, StatusPattern},
    schema::DEFAULTS,
    settings::{OFF, Value},
};

impl Config {
    /// The configuration as TOML, in the form and order of `config/default.toml`, without comments.
    ///
    /// Every key of the defaults, of `[agent]` and of `[protected]` is there; a policy has what
    /// differs from the defaults. [`parse_str`](super::parse_str) makes the same configuration of
    /// it, whatever file that came from, except for [`Config::source`].
    ///
    /// A file cannot say anything about a breaker or retry that is off, so settings under one that
    /// is off are not written. A configuration from a file loses nothing by that: such settings are
    /// those of the built-in defaults or, in a policy, those of the defaults. One that was put
    /// together otherwise gets them back as these.
    pub fn to_toml(&self) -> String {
        let mut text = format!("mode = {}\n", quoted(self.mode));
        let defaults = Sections::whole(&self.defaults);
        if !defaults.off.is_empty() {
            text.push_str("\n[defaults]\n");
        }
        defaults.write(&mut text, "defaults", "\n");
        let base = as_read_back(&self.defaults);
        for policy in &self.policies {
            text.push_str("\n[[policy]]\n");
            key(&mut text, "name", &quoted(&policy.name));
            if !policy.destinations.is_empty() {
                key(&mut text, "destinations", &strings(&policy.destinations));
            }
            if !policy.workloads.is_empty() {
                key(&mut text, "workloads", &strings(&policy.workloads));
            }
            Sections::differing(policy, &base).write(&mut text, "policy", "");
        }
        text.push_str("\n[agent]\n");
        let agent = &self.agent;
        key(&mut text, "max_destinations", &agent.max_destinations);
        key(&mut text, "ring_bytes", &agent.ring_bytes);
        key(&mut text, "events_kept", &agent.events_kept);
        key(&mut text, "log", &quoted(agent.log));
        text.push_str("\n[protected]\n");
        key(&mut text, "destinations", &strings(&self.protected));
        text
    }
}

/// What is to be written of a policy's four sections.
#[derive(Default)]
struct Sections {
    /// Sections to switch off.
    off: Vec<&'static str>,
    /// The other sections, each with its keys; one without keys is switched on by being there.
    tables: Vec<(&'static str, Vec<(&'static str, Value)>)>,
}

impl Sections {
    /// Everything that a file can say of the defaults.
    fn whole(defaults: &Policy) -> Self {
        let settings = defaults.values();
        let mut sections = Self::default();
        for name in DEFAULTS {
            match switch(&settings, name) {
                Some(false) => sections.off.push(name),
                _ => sections.tables.push((name, keys(&settings, name))),
            }
        }
        sections
    }

    /// What a policy has otherwise than `base`.
    fn differing(policy: &Policy, base: &Policy) -> Self {
        let (settings, base) = (policy.values(), base.values());
        let mut sections = Self::default();
        for name in DEFAULTS {
            let (on, base_on) = (switch(&settings, name), switch(&base, name));
            if on == Some(false) {
                if base_on == Some(true) {
                    sections.off.push(name);
                }
                continue;
            }
            let inherited = keys(&base, name);
            let mut keys = keys(&settings, name);
            keys.retain(|setting| !inherited.contains(setting));
            if on != base_on || !keys.is_empty() {
                sections.tables.push((name, keys));
            }
        }
        sections
    }

    /// Writes the sections under `parent`, whose own header stands already if anything is off;
    /// `gap` goes before each header.
    fn write(&self, text: &mut String, parent: &str, gap: &str) {
        // Before the tables, as whatever follows the header of a table belongs to it.
        for name in &self.off {
            key(text, name, &quoted(OFF));
        }
        for (name, keys) in &self.tables {
            line(text, format_args!("{gap}[{parent}.{name}]"));
            for (name, value) in keys {
                key(text, name, &in_file(value));
            }
        }
    }
}

/// The defaults as they come out of what [`Config::to_toml`] writes: below what is off, the
/// built-in settings.
fn as_read_back(defaults: &Policy) -> Policy {
    let built_in = &super::built_in().defaults;
    let mut defaults = defaults.clone();
    if !defaults.breaker.enabled {
        defaults.breaker = BreakerPolicy {
            enabled: false,
            ..built_in.breaker.clone()
        };
    }
    if !defaults.retry.enabled {
        defaults.retry = RetryPolicy {
            enabled: false,
            ..built_in.retry.clone()
        };
    }
    defaults
}

/// Whether a section is on; `None` if it cannot be off.
fn switch(settings: &[(&'static str, Value)], section: &str) -> Option<bool> {
    settings.iter().find_map(|(key, value)| match value {
        Value::Switch(on) if *key == section => Some(*on),
        _ => None,
    })
}

/// The settings of a section, each under the last part of its key.
fn keys(settings: &[(&'static str, Value)], section: &str) -> Vec<(&'static str, Value)> {
    let own = settings.iter().filter_map(|(key, value)| {
        let (of, name) = key.split_once('.')?;
        (of == section).then(|| (name, value.clone()))
    });
    own.collect()
}

fn key(text: &mut String, name: &str, value: &impl Display) {
    line(text, format_args!("{name} = {value}"));
}

fn line(text: &mut String, line: std::fmt::Arguments<'_>) {
    // Writing to a `String` cannot fail.
    let _ = writeln!(text, "{line}");
}

/// A value as it stands in a file.
fn in_file(value: &Value) -> String {
    match value {
        Value::Switch(_) | Value::Word(_) => quoted(value),
        Value::Bare(text) => text.clone(),
        Value::Statuses(statuses) => array(statuses, |status| match status {
            StatusPattern::Class(_) => quoted(status),
            StatusPattern::Code(code) => code.to_string(),
        }),
        Value::Backoff(backoff) => {
            let (base, max) = (format_duration(backoff.base), format_duration(backoff.max));
            format!("{{ base = {}, max = {} }}", quoted(base), quoted(max))
        }
    }
}

fn strings(values: &[impl Display]) -> String {
    array(values, |value| quoted(value))
}

fn array<T>(values: &[T], written: impl Fn(&T) -> String) -> String {
    let written: Vec<_> = values.iter().map(written).collect();
    format!("[{}]", written.join(", "))
}

/// Text as a TOML string, in whichever quotes it needs.
fn quoted(text: impl Display) -> String {
    toml::Value::String(text.to_string()).to_string()
}

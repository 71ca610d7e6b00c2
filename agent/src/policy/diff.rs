//! What changed between two configurations, for the log and the `config` event.

use std::{collections::BTreeMap, fmt};

use super::{
    model::{Config, Policy},
    settings::list,
};

/// One difference between two configurations. Displays in plain words:
/// `orders-db: connect 2s -> 1s`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// A setting has another value.
    Setting {
        /// The policy's name, `defaults`, or nothing for what belongs to no policy.
        policy: Option<String>,
        /// Its key; a timeout goes without `timeouts.`.
        key: &'static str,
        /// The old value.
        from: String,
        /// The new value.
        to: String,
    },
    /// A policy is new.
    Added {
        /// Its name.
        policy: String,
    },
    /// A policy is gone.
    Removed {
        /// Its name.
        policy: String,
    },
    /// The policies that both have stand in another order, which decides between equals.
    Order,
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Setting {
                policy: Some(policy),
                key,
                from,
                to,
            } => {
                write!(f, "{policy}: {key} {from} -> {to}")
            }
            Self::Setting {
                policy: None,
                key,
                from,
                to,
            } => write!(f, "{key} {from} -> {to}"),
            Self::Added { policy } => write!(f, "policy {policy} added"),
            Self::Removed { policy } => write!(f, "policy {policy} removed"),
            Self::Order => f.write_str("order of the policies changed"),
        }
    }
}

/// What is different in `new`, in the order of the file. Empty: both do the same.
///
/// A policy that only follows a change of the defaults is not mentioned.
pub fn diff(old: &Config, new: &Config) -> Vec<Change> {
    let mut changes = Vec::new();
    compare(&mut changes, None, &top_level(old), &top_level(new));
    compare(
        &mut changes,
        Some("defaults"),
        &old.defaults.settings(),
        &new.defaults.settings(),
    );
    let followed: Vec<_> = changes.clone();

    let by_name = |config: &'_ Config| -> BTreeMap<String, usize> {
        let names = config.policies.iter().enumerate();
        names.map(|(i, policy)| (policy.name.clone(), i)).collect()
    };
    let (before, after) = (by_name(old), by_name(new));
    for policy in old
        .policies
        .iter()
        .filter(|policy| !after.contains_key(&policy.name))
    {
        changes.push(Change::Removed {
            policy: policy.name.clone(),
        });
    }
    for policy in &new.policies {
        match before.get(&policy.name).and_then(|i| old.policies.get(*i)) {
            None => changes.push(Change::Added {
                policy: policy.name.clone(),
            }),
            Some(was) => {
                let mut own = Vec::new();
                compare(
                    &mut own,
                    Some(&policy.name),
                    &whole_policy(was),
                    &whole_policy(policy),
                );
                own.retain(|change| !followed.iter().any(|default| same_step(default, change)));
                changes.append(&mut own);
            }
        }
    }
    let kept = |config: &Config, other: &BTreeMap<String, usize>| -> Vec<String> {
        let names = config.policies.iter().map(|policy| policy.name.clone());
        names.filter(|name| other.contains_key(name)).collect()
    };
    if kept(old, &after) != kept(new, &before) {
        changes.push(Change::Order);
    }
    changes
}

fn top_level(config: &Config) -> Vec<(&'static str, String)> {
    vec![
        ("mode", config.mode.to_string()),
        (
            "agent.max_destinations",
            config.agent.max_destinations.to_string(),
        ),
        ("agent.ring_bytes", config.agent.ring_bytes.to_string()),
        ("agent.events_kept", config.agent.events_kept.to_string()),
        ("agent.log", config.agent.log.to_string()),
        ("protected.destinations", bracketed(&config.protected)),
    ]
}

fn whole_policy(policy: &Policy) -> Vec<(&'static str, String)> {
    let mut all = vec![
        ("destinations", bracketed(&policy.destinations)),
        ("workloads", bracketed(&policy.workloads)),
    ];
    all.extend(policy.settings());
    all
}

fn bracketed(values: &[impl fmt::Display]) -> String {
    format!("[{}]", list(values))
}

fn compare(
    changes: &mut Vec<Change>,
    policy: Option<&str>,
    old: &[(&'static str, String)],
    new: &[(&'static str, String)],
) {
    for ((key, from), (_, to)) in old.iter().zip(new) {
        if from != to {
            changes.push(Change::Setting {
                policy: policy.map(str::to_owned),
                key: key.strip_prefix("timeouts.").unwrap_or(key),
                from: from.clone(),
                to: to.clone(),
            });
        }
    }
}

/// Whether two changes are the same step of the same setting.
fn same_step(one: &Change, other: &Change) -> bool {
    match (one, other) {
        (
            Change::Setting { key, from, to, .. },
            Change::Setting {
                key: key2,
                from: from2,
                to: to2,
                ..
            },
        ) => (key, from, to) == (key2, from2, to2),
        _ => false,
    }
}

//! What a file asks for that this version accepts but does not do.

use std::collections::BTreeMap;

use super::{
    model::{Config, Policy},
    pattern::{DestinationPattern, Target},
    settings::OFF,
};

/// Settings of which not all values are acted upon yet: "off" and what is built in are (of
/// `failure_status` that is 5xx), anything else is read and checked only. Entries come off this list
/// as the parts are built.
pub(super) const NOT_ENFORCED: &[&str] = &["breaker.failure_status"];

/// Settings on the list whose built-in value is how this version behaves.
const BUILT_IN_ACTS: &[&str] = &["breaker.failure_status"];

/// Whether this version does what a setting of this value says.
pub(super) fn is_acted_upon(key: &str, value: &str) -> bool {
    if value == OFF || !NOT_ENFORCED.contains(&key) {
        return true;
    }
    let built_in = super::built_in().defaults.settings();
    BUILT_IN_ACTS.contains(&key) && built_in.iter().any(|(k, v)| *k == key && v == value)
}

impl Config {
    /// What the file asks for and this version does not do, one line each.
    pub fn warnings(&self) -> Vec<String> {
        let built_in: BTreeMap<_, _> = super::built_in().defaults.settings().into_iter().collect();
        let defaults: BTreeMap<_, _> = self.defaults.settings().into_iter().collect();
        let mut warnings = Vec::new();

        let inert = |key: &str, value: &str| {
            value == OFF || built_in.get(key).is_some_and(|built_in| built_in == value)
        };
        warn(&mut warnings, "defaults", &self.defaults, inert);
        for policy in &self.policies {
            let scope = format!("policy {:?}", policy.name);
            // What a policy has from the defaults was said there.
            warn(&mut warnings, &scope, policy, |key, value| {
                inert(key, value) || defaults.get(key).is_some_and(|default| default == value)
            });
        }
        warn_names(&mut warnings, "protected", &self.protected);
        warnings
    }
}

fn warn(
    warnings: &mut Vec<String>,
    scope: &str,
    policy: &Policy,
    inert: impl Fn(&str, &str) -> bool,
) {
    for (key, value) in policy.settings() {
        let switched_off = (key.starts_with("breaker.") && !policy.breaker.enabled)
            || (key.starts_with("retry.") && !policy.retry.enabled);
        if NOT_ENFORCED.contains(&key) && !switched_off && !inert(key, &value) {
            warnings.push(format!(
                "{scope}: {key} = {value} is accepted but not enforced by this version"
            ));
        }
    }
}

/// Only names that the agent resolves itself protect, and it can resolve no wildcard.
fn warn_names(warnings: &mut Vec<String>, scope: &str, patterns: &[DestinationPattern]) {
    for pattern in patterns {
        if matches!(pattern.target, Target::Name { wildcard: true, .. }) {
            warnings.push(format!(
                "{scope}: destinations: {pattern} protects only names that stand in full in a policy \
                 or here: what programs are told is believed for nothing that is protected"
            ));
        }
    }
}

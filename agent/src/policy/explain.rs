//! Everything there is to say about a connection before it is made: which policies were asked and
//! with what result, what protects the destination, and where each setting comes from.

use super::{
    DEFAULT_POLICY,
    destination::Destination,
    model::{Config, Policy},
    pattern::KnownName,
    settings::{OFF, list},
};

/// The whole of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Explained {
    /// As in [`super::Resolution::policy`].
    pub policy: usize,
    /// The entry that protects the destination, if one does.
    pub guard: Option<Guard>,
    /// Every policy: the one that applies, those that lost by rank, the others by their place in
    /// the file, and the defaults.
    pub candidates: Vec<Candidate>,
    /// Every setting of the policy that applies, in the order of `config/default.toml`.
    pub settings: Vec<SourcedSetting>,
}

/// An entry of `[protected]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Guard {
    /// The entry as it was written.
    pub by: String,
    /// Its line, if it stands in a file and not in what is built in.
    pub line: Option<usize>,
}

/// A policy that was asked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// As in [`super::Resolution::policy`].
    pub policy: usize,
    /// Its name.
    pub name: String,
    /// Where it begins; `None` for the defaults.
    pub line: Option<usize>,
    /// What came of it.
    pub fit: Fit,
    /// The pattern that matched the destination.
    pub destination: Option<String>,
    /// The pattern that matched the workload.
    pub workload: Option<String>,
    /// The reason in plain words.
    pub why: String,
}

/// What came of a candidate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fit {
    /// It is the policy of the connection.
    Applies,
    /// It matches too, and another one goes before it.
    Loses,
    /// It is not for the connection.
    NoMatch,
}

/// A setting and where it comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourcedSetting {
    /// As in the file: `breaker.cooldown`.
    pub key: &'static str,
    /// As [`Policy::settings`] writes it.
    pub value: String,
    /// Who says so.
    pub source: SettingSource,
    /// The line, unless it is built in.
    pub line: Option<usize>,
    /// Why it has no effect; `None`: it has.
    pub inert: Option<&'static str>,
}

/// Who says what a setting is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SettingSource {
    /// The policy itself.
    Policy,
    /// `[defaults]` of the file.
    Defaults,
    /// No file: `config/default.toml`.
    BuiltIn,
}

impl Config {
    /// Explains a connection; parameters as for [`Config::resolve`], with which it always agrees.
    pub fn explain(
        &self,
        destination: &Destination,
        workload: Option<&str>,
        names: &[KnownName],
    ) -> Explained {
        let matches = self.matches(destination, workload, names);
        let policy = matches.first().map_or(0, |winner| winner.index);
        let mut candidates = Vec::with_capacity(self.policies.len() + 1);
        if let Some(winner) = matches.first() {
            for found in &matches {
                let (fit, why) = if found.index == winner.index {
                    (Fit::Applies, found.what_matched())
                } else {
                    let why = format!(
                        "{}, but {} goes before this one, {}",
                        found.what_matched(),
                        winner.policy.name,
                        winner.before(found)
                    );
                    (Fit::Loses, why)
                };
                candidates.push(Candidate {
                    destination: found.destination.map(ToString::to_string),
                    workload: found.workload.map(ToString::to_string),
                    ..self.candidate(found.index, found.policy, fit, why)
                });
            }
        }
        for (index, other) in (1..).zip(&self.policies) {
            if !matches.iter().any(|found| found.index == index) {
                let why = miss(other, destination, workload, names);
                candidates.push(self.candidate(index, other, Fit::NoMatch, why));
            }
        }
        let (fit, why) = match policy {
            0 => (Fit::Applies, "no policy matches, so the defaults apply"),
            _ => (Fit::Loses, "applies only where no policy matches"),
        };
        candidates.push(self.candidate(0, &self.defaults, fit, why.to_owned()));

        let guard = self.guard(destination, names).map(|(at, pattern)| Guard {
            by: pattern.to_string(),
            line: self.line(self.origins.protected(at)),
        });
        let settings = self.sourced(policy, guard.is_some());
        Explained {
            policy,
            guard,
            candidates,
            settings,
        }
    }

    fn candidate(&self, index: usize, policy: &Policy, fit: Fit, why: String) -> Candidate {
        let line = index.checked_sub(1).and_then(|i| self.origins.policy(i));
        Candidate {
            policy: index,
            name: policy.name.clone(),
            line: self.line(line),
            fit,
            destination: None,
            workload: None,
            why,
        }
    }

    fn sourced(&self, index: usize, protected: bool) -> Vec<SourcedSetting> {
        let policy = self.policy(index).unwrap_or(&self.defaults);
        let settings = policy.settings().into_iter();
        settings
            .map(|(key, value)| {
                let own = index
                    .checked_sub(1)
                    .and_then(|i| self.origins.setting(i, key));
                let (source, line) = match (own, self.line(self.origins.of_defaults(key))) {
                    (Some(line), _) => (SettingSource::Policy, Some(line)),
                    (None, Some(line)) => (SettingSource::Defaults, Some(line)),
                    (None, None) => (SettingSource::BuiltIn, None),
                };
                let inert = inert(policy, protected, key, &value);
                SourcedSetting {
                    key,
                    value,
                    source,
                    line,
                    inert,
                }
            })
            .collect()
    }

    /// A line, if it is one of a file.
    fn line(&self, line: Option<usize>) -> Option<usize> {
        line.filter(|_| self.source != super::NO_FILE)
    }
}

/// Why a setting has no effect. "off" always has: nothing happens.
fn inert(policy: &Policy, protected: bool, key: &str, value: &str) -> Option<&'static str> {
    if value == OFF {
        return None;
    }
    if key.starts_with("breaker.") && !policy.breaker.enabled {
        return Some("the breaker is off");
    }
    if key.starts_with("retry.") && !policy.retry.enabled {
        return Some("retry is off");
    }
    protected.then_some("protected")
}

/// Why a policy is not for a connection.
fn miss(
    policy: &Policy,
    destination: &Destination,
    workload: Option<&str>,
    names: &[KnownName],
) -> String {
    let to = policy.destinations.is_empty()
        || policy
            .destinations
            .iter()
            .any(|pattern| pattern.matches(destination, names));
    let from = &policy.workloads;
    match (to, workload) {
        (false, _) => format!("none of its destinations: {}", list(&policy.destinations)),
        (true, None) => format!("only for workloads {}; none was given", list(from)),
        (true, Some(_)) => format!("none of its workloads: {}", list(from)),
    }
}

impl Candidate {
    /// Whether these are the defaults.
    pub fn is_default(&self) -> bool {
        self.name == DEFAULT_POLICY
    }
}

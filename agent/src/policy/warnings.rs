//! What a file asks for that cannot be had.

use super::{
    model::Config,
    pattern::{DestinationPattern, Target},
};

impl Config {
    /// What the file asks for and cannot have, one line each.
    pub fn warnings(&self) -> Vec<String> {
        let mut warnings = Vec::new();
        warn_names(&mut warnings, "protected", &self.protected);
        warnings
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

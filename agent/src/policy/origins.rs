//! Where in the file each setting stands, so that `explain` can name the line.

use std::collections::BTreeMap;

use toml::de::{DeTable, DeValue};

use super::schema::DEFAULTS;

/// Lines of a configuration, counted from 1. Nothing but [`explain`](super::Config::explain) looks
/// at them: two configurations that say the same are equal wherever it stands, so these always are.
#[derive(Clone, Debug, Default)]
pub struct Origins {
    defaults: Lines,
    /// In the order of the file.
    policies: Vec<PolicyLines>,
    /// Of each protected destination, in their order.
    protected: Vec<usize>,
}

/// Lines by the keys of [`super::Policy::settings`].
type Lines = BTreeMap<String, usize>;

#[derive(Clone, Debug, Default)]
struct PolicyLines {
    line: usize,
    settings: Lines,
}

impl PartialEq for Origins {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl Origins {
    /// Of a file that was read without a problem. `line` gives the line of a byte.
    pub(super) fn of(root: &DeTable<'_>, line: impl Fn(usize) -> usize) -> Self {
        let table = |key: &str| root.get(key).and_then(|value| value.get_ref().as_table());
        let policies = root
            .get("policy")
            .and_then(|list| list.get_ref().as_array());
        let protected = table("protected")
            .and_then(|table| table.get("destinations"))
            .and_then(|list| list.get_ref().as_array());
        Self {
            defaults: table("defaults").map_or_else(Lines::new, |table| lines(table, &line)),
            policies: policies
                .into_iter()
                .flatten()
                .map(|policy| PolicyLines {
                    line: line(policy.span().start),
                    settings: policy
                        .get_ref()
                        .as_table()
                        .map_or_else(Lines::new, |table| lines(table, &line)),
                })
                .collect(),
            protected: protected
                .into_iter()
                .flatten()
                .map(|entry| line(entry.span().start))
                .collect(),
        }
    }

    /// Where the defaults set a key, if the file does.
    pub(super) fn of_defaults(&self, key: &str) -> Option<usize> {
        self.defaults.get(key).copied()
    }

    /// Where a policy begins; `index` counts from 0.
    pub(super) fn policy(&self, index: usize) -> Option<usize> {
        self.policies.get(index).map(|policy| policy.line)
    }

    /// Where a policy sets a key, if it does; `index` counts from 0.
    pub(super) fn setting(&self, index: usize, key: &str) -> Option<usize> {
        self.policies.get(index)?.settings.get(key).copied()
    }

    /// Where a protected destination stands; `index` counts from 0.
    pub(super) fn protected(&self, index: usize) -> Option<usize> {
        self.protected.get(index).copied()
    }
}

/// The sections of one policy, or of the defaults, and the keys in them.
fn lines(policy: &DeTable<'_>, line: impl Fn(usize) -> usize) -> Lines {
    let mut lines = Lines::new();
    for (section, value) in policy.iter() {
        let name: &str = section.get_ref();
        if !DEFAULTS.contains(&name) {
            continue;
        }
        lines.insert(name.to_owned(), line(section.span().start));
        if let DeValue::Table(table) = value.get_ref() {
            for (key, _) in table.iter() {
                let key_name: &str = key.get_ref();
                lines.insert(format!("{name}.{key_name}"), line(key.span().start));
            }
        }
    }
    lines
}

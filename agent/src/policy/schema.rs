//! Reads a whole file over a base: what the file does not say stays as it is in the base.
//!
//! The base of every file is the built-in default configuration, which is itself a file
//! (`config/default.toml`) read over [`blank`] values; so a default is written in one place only.
//! Sections are read in [`super::sections`]; here is how they hang together.

use toml::{
    Spanned,
    de::{DeTable, DeValue},
};

use super::{
    error::ConfigError,
    model::{AgentConfig, Config, LogFormat, Mode, Policy},
    origins::Origins,
    pattern::DestinationPattern,
    reader::{Complaint, Problems, Section},
    rules::{one_of, parsed, whole},
    sections::{BREAKER, LIMITS, RETRY, TIMEOUTS, blank, read_settings},
    workload::WorkloadPattern,
};

/// Names of the keys of a table.
pub(super) type SectionKeys = [&'static str];

pub(super) const ROOT: &SectionKeys = &["mode", "defaults", "policy", "agent", "protected"];
pub(super) const DEFAULTS: &SectionKeys = &["timeouts", "breaker", "retry", "limits"];
pub(super) const POLICY: &SectionKeys = &[
    "name",
    "destinations",
    "workloads",
    "timeouts",
    "breaker",
    "retry",
    "limits",
];
pub(super) const AGENT: &SectionKeys = &["max_destinations", "ring_bytes", "events_kept", "log"];
pub(super) const PROTECTED: &SectionKeys = &["destinations"];

/// Every table, to tell somebody where a misplaced key belongs.
pub(super) const SECTIONS: &[(&str, &SectionKeys)] = &[
    ("\"timeouts\"", TIMEOUTS),
    ("\"breaker\"", BREAKER),
    ("\"retry\"", RETRY),
    ("\"limits\"", LIMITS),
    ("[agent]", AGENT),
    ("[[policy]]", POLICY),
    ("the top of the file", ROOT),
];

/// Most policies in a file. The kernel holds the settings of each, and a reload must find room.
pub const MAX_POLICIES: usize = 1023;

/// Most entries of the kernel's address table, shared by all policies and `protected`
/// (`POLICY_TRIE` in agent-ebpf/src/maps.rs).
pub const MAX_KERNEL_ENTRIES: usize = 16_384;

const PATTERN_ALLOWED: &str = "an address, a prefix or a name, each with or without a port, like \
    \"10.0.0.5:5432\", \"10.0.0.0/8\", \"[2001:db8::]/32:443\", \"db.internal:5432\", \"*.internal\"";
const WORKLOAD_ALLOWED: &str =
    "paths of control groups, \"*\" for any run of characters, like \"system.slice/billing-*\"";
const MAX_NAME: usize = 64;

/// A configuration in which every key is still missing.
pub(super) fn blank_config() -> Config {
    Config {
        source: String::new(),
        mode: Mode::Enforce,
        defaults: blank(),
        policies: Vec::new(),
        agent: AgentConfig {
            max_destinations: 0,
            ring_bytes: 0,
            events_kept: 0,
            log: LogFormat::Text,
        },
        protected: Vec::new(),
        origins: Origins::default(),
    }
}

/// Reads `text` over `base`.
pub(super) fn parse_over(base: &Config, file: &str, text: &str) -> Result<Config, ConfigError> {
    let mut problems = Problems::new(text);
    let (root, errors) = DeTable::parse_recoverable(text);
    for error in &errors {
        let at = error.span().map_or(0, |span| span.start);
        let what = format!("is not TOML: {}", error.message().replace('\n', ", "));
        problems.key("", at, Complaint::new(what, ""));
    }
    let mut config = base.clone();
    config.source = file.to_owned();
    // Half a tree would only make problems that are none.
    if errors.is_empty() {
        read_root(&mut problems, &root, &mut config);
        config.origins = Origins::of(root.get_ref(), |at| problems.place(at).0);
    }
    let found = problems.finish();
    if found.is_empty() {
        return Ok(config);
    }
    Err(ConfigError {
        file: file.to_owned(),
        problems: found,
    })
}

fn read_root<'t>(problems: &mut Problems<'t>, root: &Spanned<DeTable<'t>>, config: &mut Config) {
    let mut top = Section::new(problems, root.get_ref(), 0..0, String::new(), ROOT);
    top.set(
        "mode",
        &mut config.mode,
        one_of(&[("enforce", Mode::Enforce), ("observe", Mode::Observe)]),
    );
    if let Some(mut defaults) = top.table("defaults", DEFAULTS) {
        read_settings(&mut defaults, &mut config.defaults);
    }
    if let Some(mut agent) = top.table("agent", AGENT) {
        read_agent(&mut agent, &mut config.agent);
    }
    if let Some(mut protected) = top.table("protected", PROTECTED)
        && let Some(destinations) =
            protected.list("destinations", PATTERN_ALLOWED, parsed(PATTERN_ALLOWED))
    {
        config.protected = destinations;
    }
    config.policies = read_policies(&mut top, &config.defaults);

    let entries = config.kernel_entries().len();
    if entries > MAX_KERNEL_ENTRIES {
        let what = format!(
            "the destinations make {entries} entries in the kernel, where every prefix without \
             a port counts once more for each port that any policy names"
        );
        top.problems.key(
            "policy",
            0,
            Complaint::new(what, format!("at most {MAX_KERNEL_ENTRIES}")),
        );
    }
}

fn read_agent(section: &mut Section<'_, '_>, agent: &mut AgentConfig) {
    section.set(
        "max_destinations",
        &mut agent.max_destinations,
        whole(16..=1_000_000),
    );
    section.set("ring_bytes", &mut agent.ring_bytes, |value| {
        const ALLOWED: &str = "a power of two from 65536 (64 KiB) to 67108864 (64 MiB)";
        match whole(65_536..=67_108_864)(value) {
            Ok(bytes) if bytes.is_power_of_two() => Ok(bytes),
            Ok(_) => Err(Complaint::new("is no power of two", ALLOWED)),
            Err(complaint) => Err(Complaint {
                allowed: ALLOWED.to_owned(),
                ..complaint
            }),
        }
    });
    section.set("events_kept", &mut agent.events_kept, whole(0..=1_000_000));
    section.set(
        "log",
        &mut agent.log,
        one_of(&[("text", LogFormat::Text), ("json", LogFormat::Json)]),
    );
}

fn read_policies(top: &mut Section<'_, '_>, defaults: &Policy) -> Vec<Policy> {
    let Some(value) = top.get("policy") else {
        return Vec::new();
    };
    let DeValue::Array(array) = value.get_ref() else {
        top.complain(
            "policy",
            Complaint::new("must be a list of tables", "[[policy]]"),
        );
        return Vec::new();
    };
    if array.len() > MAX_POLICIES {
        let what = format!("the file has {} policies", array.len());
        let complaint = Complaint::new(what, format!("at most {MAX_POLICIES}"));
        top.problems.key("policy", value.span().start, complaint);
    }
    let mut policies: Vec<Policy> = Vec::new();
    // Names that were used, each with its line.
    let mut names: Vec<(String, usize)> = Vec::new();
    for (i, element) in array.iter().enumerate() {
        let DeValue::Table(table) = element.get_ref() else {
            let complaint = Complaint::new("must be a table", "[[policy]]");
            top.problems.value("policy", element.span(), complaint);
            continue;
        };
        let name = match table.get("name").map(Spanned::get_ref) {
            Some(DeValue::String(name)) if check_name(name).is_ok() => Some(name.as_ref()),
            _ => None,
        };
        let path = match name {
            Some(name) => format!("policy[{name}]"),
            None => format!("policy[{}]", i + 1),
        };
        let mut section = Section::new(top.problems, table, element.span(), path, POLICY);
        let mut policy = Policy {
            name: String::new(),
            ..defaults.clone()
        };
        read_policy(&mut section, &mut policy);
        if let Some(value) = section.get("name").filter(|_| name.is_some()) {
            let (line, _) = section.problems.place(value.span().start);
            match names.iter().find(|(used, _)| *used == policy.name) {
                Some((_, first)) => {
                    let what = format!("is the name of two policies, on lines {first} and {line}");
                    section.complain("name", Complaint::new(what, "each name once"));
                }
                None => names.push((policy.name.clone(), line)),
            }
        }
        policies.push(policy);
    }
    policies
}

fn read_policy(section: &mut Section<'_, '_>, policy: &mut Policy) {
    if section.get("name").is_none() {
        section.complain("name", Complaint::new("is missing", NAME_ALLOWED));
    }
    section.set("name", &mut policy.name, |value| match value {
        DeValue::String(name) => {
            check_name(name).map_err(|what| Complaint::new(what, NAME_ALLOWED))?;
            Ok(name.clone().into_owned())
        }
        _ => Err(Complaint::new("must be text in quotes", NAME_ALLOWED)),
    });
    for key in ["destinations", "workloads"] {
        if let Some(DeValue::Array(list)) = section.get(key).map(Spanned::get_ref)
            && list.is_empty()
        {
            let what =
                format!("is empty, so the policy would apply to nothing; leave {key} away for all");
            section.complain(key, Complaint::new(what, ""));
        }
    }
    if section.get("destinations").is_none() && section.get("workloads").is_none() {
        let what = "has neither destinations nor workloads, so it would apply to everything; \
                    that is what [defaults] is for";
        section.complain("destinations", Complaint::new(what, PATTERN_ALLOWED));
    }
    let destinations: Option<Vec<DestinationPattern>> =
        section.list("destinations", PATTERN_ALLOWED, parsed(PATTERN_ALLOWED));
    let workloads: Option<Vec<WorkloadPattern>> =
        section.list("workloads", WORKLOAD_ALLOWED, parsed(WORKLOAD_ALLOWED));
    policy.destinations = destinations.unwrap_or_default();
    policy.workloads = workloads.unwrap_or_default();
    read_settings(section, policy);
}

const NAME_ALLOWED: &str = "1 to 64 printable characters, each name once, not \"default\"";

fn check_name(name: &str) -> Result<(), &'static str> {
    if name.is_empty() {
        return Err("is empty");
    }
    if name.chars().count() > MAX_NAME {
        return Err("is too long");
    }
    if name.trim() != name || name.chars().any(char::is_control) {
        return Err("begins or ends with a space, or holds a control character");
    }
    if name == super::DEFAULT_POLICY {
        return Err("is the name of the defaults");
    }
    Ok(())
}

//! `explain`: candidates, protection, and the source of each setting.

use super::super::{Config, Fit, SettingSource, parse_str};

const FILE: &str = "\
mode = \"enforce\"
[defaults.timeouts]
connect = \"1500ms\"
[defaults.breaker]
cooldown = \"10s\"

[[policy]]
name = \"wide\"
destinations = [\"10.0.0.0/8\"]
timeouts = { connect = \"900ms\" }
breaker = \"off\"

[[policy]]
name = \"narrow\"
destinations = [\"10.0.0.0/16:5432\", \"10.9.0.0/16\"]
[policy.timeouts]
read = \"3s\"
connect = \"1s\"

[[policy]]
name = \"billing\"
destinations = [\"10.0.0.0/8\"]
workloads = [\"billing-*\"]

[protected]
destinations = [
  \"192.0.2.0/24\",
  \"10.0.0.53\",
]
";

fn config() -> Config {
    parse_str("b.toml", FILE).expect("a good file")
}

fn fits(config: &Config, to: &str, workload: Option<&str>) -> Vec<(String, Fit, Option<usize>)> {
    let explained = config.explain(&to.parse().unwrap(), workload, &[]);
    let candidates = explained.candidates.into_iter();
    candidates.map(|c| (c.name, c.fit, c.line)).collect()
}

#[test]
fn every_policy_is_a_candidate() {
    let config = config();
    let of = |name: &str, fit, line: usize| (name.to_owned(), fit, Some(line));
    let default = |fit| ("default".to_owned(), fit, None);
    assert_eq!(
        fits(&config, "10.0.0.5:5432", None),
        [
            of("narrow", Fit::Applies, 13),
            of("wide", Fit::Loses, 7),
            of("billing", Fit::NoMatch, 20),
            default(Fit::Loses),
        ]
    );
    assert_eq!(
        fits(&config, "10.0.0.5:5432", Some("billing-1")),
        [
            of("billing", Fit::Applies, 20),
            of("narrow", Fit::Loses, 13),
            of("wide", Fit::Loses, 7),
            default(Fit::Loses),
        ]
    );
    assert_eq!(
        fits(&config, "203.0.113.1:80", Some("x"))[3],
        default(Fit::Applies)
    );
}

#[test]
fn reasons_are_said() {
    let explained = config().explain(&"10.0.0.5:5432".parse().unwrap(), None, &[]);
    let why: Vec<_> = explained
        .candidates
        .iter()
        .map(|c| c.why.as_str())
        .collect();
    assert_eq!(
        why,
        [
            "destination 10.0.0.0/16:5432 matches",
            "destination 10.0.0.0/8 matches, but narrow goes before this one, whose prefix is shorter",
            "only for workloads billing-*; none was given",
            "applies only where no policy matches",
        ]
    );
    let explained = config().explain(&"203.0.113.1:80".parse().unwrap(), Some("web"), &[]);
    assert_eq!(
        explained.candidates[0].why,
        "none of its destinations: 10.0.0.0/8"
    );
    let explained = config().explain(&"10.1.0.1:80".parse().unwrap(), Some("web"), &[]);
    assert_eq!(
        explained.candidates[2].why,
        "none of its workloads: billing-*"
    );
}

#[test]
fn settings_have_their_source_and_line() {
    let explained = config().explain(&"10.0.0.5:5432".parse().unwrap(), None, &[]);
    let of = |key: &str| {
        let setting = explained.settings.iter().find(|s| s.key == key).unwrap();
        (setting.value.as_str(), setting.source, setting.line)
    };
    use SettingSource::{BuiltIn, Defaults, Policy};
    assert_eq!(of("timeouts.connect"), ("1s", Policy, Some(18)));
    assert_eq!(of("timeouts.read"), ("3s", Policy, Some(17)));
    assert_eq!(of("breaker.cooldown"), ("10s", Defaults, Some(5)));
    assert_eq!(of("breaker"), ("on", Defaults, Some(4)));
    assert_eq!(of("breaker.window"), ("20", BuiltIn, None));
    // Written as one value, and switched off.
    let wide = config().explain(&"10.200.0.1:1".parse().unwrap(), None, &[]);
    let off = wide.settings.iter().find(|s| s.key == "breaker").unwrap();
    assert_eq!((off.value.as_str(), off.line), ("off", Some(11)));
    let cooldown = wide.settings.iter().find(|s| s.key == "breaker.cooldown");
    let cooldown = cooldown.unwrap();
    assert_eq!(
        (cooldown.source, cooldown.inert),
        (Defaults, Some("the breaker is off"))
    );
    // Without a file no line is one of a file.
    let built_in = Config::default_config().explain(&"10.0.0.5:53".parse().unwrap(), None, &[]);
    assert!(
        built_in
            .settings
            .iter()
            .all(|s| s.line.is_none() && s.source == BuiltIn)
    );
    let guard = built_in.guard.unwrap();
    assert_eq!((guard.by.as_str(), guard.line), ("0.0.0.0/0:53", None));
}

#[test]
fn protection_names_its_entry_and_stills_the_settings() {
    let explained = config().explain(&"10.0.0.53:80".parse().unwrap(), None, &[]);
    let guard = explained.guard.unwrap();
    assert_eq!((guard.by.as_str(), guard.line), ("10.0.0.53", Some(28)));
    let connect = &explained.settings[0];
    assert_eq!(
        (connect.key, connect.inert),
        ("timeouts.connect", Some("protected"))
    );
}

/// Where something stands is no difference between two configurations.
#[test]
fn lines_make_no_difference() {
    let moved = format!("\n\n# moved\n{FILE}");
    assert_eq!(config(), parse_str("b.toml", &moved).unwrap());
    assert_eq!(
        super::super::diff(&config(), &parse_str("b.toml", &moved).unwrap()),
        []
    );
}

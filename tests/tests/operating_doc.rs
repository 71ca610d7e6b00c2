//! docs/OPERATING.md against a running agent.

use std::{collections::BTreeSet, fs, path::Path};

use tests::{agent::Agent, cgroup::TestCgroup, dialer::Dialer, net::Namespace, wait};

const DIAL: &str = env!("CARGO_BIN_EXE_dial");

/// Every metric of a page of an agent that has seen a breaker open is explained, and no other.
#[test]
fn every_metric_is_explained() {
    let namespace = Namespace::new("metrics");
    let group = TestCgroup::new("metrics");
    // The budget of retries is shown where there is one; the third attempt is the last to pass.
    let config = "[defaults.breaker]\nconsecutive_failures = 3\n[defaults.retry]\nlimit = 2\n";
    let agent = Agent::start(&group, config);
    let mut dialer = Dialer::start(DIAL, &group, &namespace);
    for _ in 0..6 {
        let to = "127.0.0.1:80".parse().expect("an address");
        assert_eq!(dialer.connect(to).errno, libc::ECONNREFUSED);
    }
    agent.wait_state("127.0.0.1:80", "open");
    let page = wait::until("the breaker's change", wait::LONGEST, || {
        let page = agent.get("/metrics").body;
        page.contains("# TYPE backstop_breaker_transitions_total ")
            .then_some(page)
    });
    let mut given: BTreeSet<&str> = page
        .lines()
        .filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next())
        .collect();
    // Only in observe mode.
    given.insert("backstop_would_reject_outcomes_total");
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/OPERATING.md");
    let text = fs::read_to_string(path).expect("docs/OPERATING.md");
    let explained: BTreeSet<&str> = text
        .lines()
        .filter_map(|line| line.strip_prefix("| `backstop_").map(|_| &line[3..]))
        .filter_map(|line| line.split(['`', '{']).next())
        .collect();
    assert_eq!(explained, given);
}

/// The words in backquotes of a line of docs/OPERATING.md.
fn words(line: &str) -> BTreeSet<&str> {
    line.split('`').skip(1).step_by(2).collect()
}

/// Every word that events, reasons and kinds can have is named where its table row is.
#[test]
fn every_kind_and_reason_is_named() {
    use backstop::control::api::{
        ConfigAction, Event, Failures, ReasonKind, Rejections, SafetyAction,
    };
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/OPERATING.md");
    let text = fs::read_to_string(path).expect("docs/OPERATING.md");
    let row = |begin: &str| {
        let begin = format!("| `{begin}");
        let mut lines = text.lines().filter(|line| line.starts_with(&begin));
        words(lines.next().unwrap_or_else(|| panic!("no row {begin}")))
    };
    fn each<const N: usize>(each: [(&'static str, u64); N]) -> Vec<&'static str> {
        each.map(|(word, _)| word).to_vec()
    }
    let failures = each(Failures::default().each());
    let rejections = each(Rejections::default().each());
    let timeouts = backstop::metrics::TIMEOUTS.map(|kind| kind.as_str());
    let reasons: Vec<_> = ReasonKind::ALL.iter().map(|word| word.as_str()).collect();
    let actions: Vec<_> = ConfigAction::ALL.iter().map(|word| word.as_str()).collect();
    let safety: Vec<_> = SafetyAction::ALL.iter().map(|word| word.as_str()).collect();
    for (begin, wanted) in [
        ("backstop_failures_total", &failures[..]),
        ("backstop_rejected_total", &rejections),
        ("backstop_timeouts_total", &timeouts),
        ("backstop_held_total", &["backoff", "spin"]),
        ("backstop_breaker_transitions_total", &reasons),
        ("rejected` | connects", &rejections),
        ("held`", &["backoff", "spin"]),
        ("timeout`", &timeouts),
        ("config`", &actions),
        ("safety`", &safety),
    ] {
        let named = row(begin);
        for word in wanted {
            assert!(
                named.contains(word),
                "{begin}: {word} is not named: {named:?}"
            );
        }
    }
    let events = text
        .split("\n## Events\n")
        .nth(1)
        .and_then(|rest| rest.split("\n## ").next());
    let named = words(events.expect("the section"));
    for kind in Event::KINDS {
        assert!(named.contains(kind), "{kind} is not explained");
    }
}

use super::*;
use crate::control::api::CheckStatus;

const OWN: [OwnProgram; 2] = [
    OwnProgram {
        hook: "connect4",
        attach_type: 10,
        name: "connect4",
        id: Some(1),
    },
    OwnProgram {
        hook: "sock_ops",
        attach_type: 3,
        name: "follow",
        id: Some(2),
    },
];

fn other(name: &str, cgroup: &str, can_change_verdict: bool) -> OtherProgram {
    OtherProgram {
        id: 7,
        name: name.to_owned(),
        position: Position::After,
        cgroup: cgroup.to_owned(),
        attach_flags: vec!["multi".to_owned()],
        can_change_verdict,
    }
}

fn found(hook: &str, others: Vec<OtherProgram>) -> Found {
    Found {
        reports: vec![HookReport {
            cgroup: "/c/a".to_owned(),
            hook: hook.to_owned(),
            attached: true,
            verified_ms_ago: None,
            others,
        }],
        ..Found::default()
    }
}

#[test]
fn who_can_change_a_verdict() {
    let said = |found: &Found| -> Vec<_> {
        let checks = others(found, &OWN);
        checks
            .into_iter()
            .map(|check| (check.status, check.what))
            .collect()
    };
    let none = said(&found("connect4", vec![]));
    assert_eq!(
        none,
        [(
            CheckStatus::Ok,
            "Nobody else has a program on our hooks.".to_owned()
        )]
    );
    let one = said(&found("egress", vec![other("fw", "/c", false)]));
    assert!(one[0].1.starts_with("One other program"), "{one:?}");
    let later = said(&found("connect4", vec![other("lb", "/c", true)]));
    assert_eq!(later.len(), 1);
    assert_eq!(later[0].0, CheckStatus::Warn);
    assert!(
        later[0].1.contains("lb (id 7, on connect4 of /c)"),
        "{later:?}"
    );
    let follower = said(&found("sock_ops", vec![other("", "/c/a", false)]));
    assert!(
        follower[0].1.contains("a program without a name (id 7"),
        "{follower:?}"
    );
}

#[test]
fn programs_of_other_agents_are_told_as_such() {
    let mut found = found("connect4", vec![other("connect4", "/c", true)]);
    found.agents.push(OtherAgent {
        cgroup: "/c".into(),
        ours: "/c/a".into(),
        place: Where::Above,
        pid: Some(12),
    });
    let checks = checks(&found, &OWN, &[], &[], &[], false);
    let warned: Vec<_> = checks
        .iter()
        .filter(|c| c.status == CheckStatus::Warn)
        .collect();
    assert_eq!(warned.len(), 1);
    assert_eq!(
        warned[0].what,
        "Another agent (process 12) is attached to cgroup /c, which holds /c/a: both count every call made \
         in /c/a, and what either refuses is refused."
    );
}

#[test]
fn what_was_taken_off() {
    let missing = [(
        "/c/a".to_owned(),
        vec!["connect4".to_owned(), "egress".to_owned()],
    )];
    let watched = [Watched {
        path: "/c/a".into(),
        is_attached: true,
        verified_ms: None,
        verified6_ms: None,
    }];
    let all = checks(&Found::default(), &OWN, &watched, &missing, &[], false);
    assert_eq!(all[0].status, CheckStatus::Fail);
    assert!(
        all[0].what.contains("connect4 and egress of /c/a"),
        "{}",
        all[0].what
    );
    let all = checks(&Found::default(), &OWN, &watched, &[], &[], false);
    assert_eq!(
        all[0].what,
        "The kernel has our programs on all 2 hooks of the watched control group."
    );
}

#[test]
fn groups_below() {
    let tree = tempfile::tempdir().unwrap();
    fs::create_dir_all(tree.path().join("a/b")).unwrap();
    fs::write(tree.path().join("file"), "").unwrap();
    let (found, is_cut) = below(tree.path());
    assert_eq!(found, [tree.path().join("a"), tree.path().join("a/b")]);
    assert!(!is_cut);
}

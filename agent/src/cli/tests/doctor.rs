//! `doctor` for people, and its exit codes.

use std::io;

use super::super::{
    doctor::{exit_code, no_agent, text},
    examine,
    output::Output,
    table::Style,
};
use super::*;
use crate::{
    control::{
        api::{CheckStatus, DoctorReport, Timestamp, tests::doctor_report},
        client::ClientError,
    },
    kernel::support::Unsupported,
};

const PLAIN: Style = Style {
    colour: false,
    width: 100,
    now: Timestamp::from_unix_ms(0),
};

fn unreachable(kind: io::ErrorKind) -> ClientError {
    ClientError::Unreachable {
        socket: "/s".into(),
        source: kind.into(),
    }
}

#[test]
fn problems_first_each_with_its_remedy() {
    let expected = "\
backstop 0.1.0  process 812  up 3m2s: this node is protected, 1 warning

warn  priority  The event thread has no real-time priority.
                -> give the agent CAP_SYS_NICE
ok    mode      Verdicts are enforced.

Hooks of /sys/fs/cgroup/shop:
  connect4      attached, proven 4s ago
                after ours: lb4 (id 12, on /sys/fs/cgroup, multi)
";
    assert_eq!(text(&doctor_report(), PLAIN), expected);
}

#[test]
fn what_is_not_protected_says_so_first() {
    let first = |report: &DoctorReport| text(report, PLAIN).lines().next().unwrap().to_owned();
    let mut report = doctor_report();
    report.ok = false;
    report.checks[0].status = CheckStatus::Fail;
    assert_eq!(
        first(&report),
        "backstop 0.1.0  process 812  up 3m2s: NOT PROTECTED, 1 problem"
    );
    report.agent = None;
    assert_eq!(first(&report), "NOT PROTECTED, 1 problem");
    // Who may not ask knows nothing.
    report.checks = vec![no_agent(
        &unreachable(io::ErrorKind::PermissionDenied),
        false,
    )];
    assert_eq!(
        first(&report),
        "NOT KNOWN whether this node is protected, 1 problem"
    );
    report.checks = vec![no_agent(&unreachable(io::ErrorKind::NotFound), false)];
    assert_eq!(first(&report), "NOT PROTECTED, 1 problem");
    let mut observed = doctor_report();
    observed.agent.as_mut().unwrap().mode = Mode::Observe;
    assert!(first(&observed).ends_with("this node is observed, and nothing is refused, 1 warning"));
}

/// Programs, groups and reasons are named by whoever likes.
#[test]
fn names_reach_the_terminal_harmless() {
    let mut report = doctor_report();
    report.checks[0].what = "cgroup /a\u{1b}[2J".to_owned();
    report.checks[0].remedy = Some("do\r".to_owned());
    report.hooks[0].cgroup = "/c\u{7}".to_owned();
    report.hooks[0].others[0].name = "x\u{1b}]0;y".to_owned();
    report.hooks[0].others[0].cgroup = "/d\u{9b}".to_owned();
    let text = text(&report, PLAIN);
    assert!(
        text.chars().all(|c| c == '\n' || !c.is_control()),
        "{text:?}"
    );
}

#[test]
fn others_below_are_counted() {
    let mut report = doctor_report();
    let mut below = report.hooks[0].others[0].clone();
    below.cgroup = "/sys/fs/cgroup/shop/inner".to_owned();
    report.hooks[0].others.extend([below.clone(), below]);
    report.hooks[0].attached = false;
    let text = text(&report, PLAIN);
    assert!(text.contains("  connect4      NOT attached\n"), "{text}");
    assert!(
        text.ends_with("                2 programs on groups below\n"),
        "{text}"
    );
}

/// Runs `doctor` against an agent that answers with this.
async fn examined(report: DoctorReport, json: bool) -> (u8, String) {
    let backend = Fake::new();
    *backend.report.lock().unwrap() = report;
    let served = serve_fake(&backend, Limits::default());
    let client = served.client.clone();
    tokio::task::spawn_blocking(move || {
        let mut printed = Vec::new();
        let code = examine(&client, json, &mut Output::to(&mut printed));
        (code, String::from_utf8(printed).unwrap())
    })
    .await
    .unwrap()
}

#[tokio::test]
async fn an_agents_findings_make_the_exit_code() {
    let well = doctor_report();
    assert_eq!(examined(well.clone(), false).await, (0, text(&well, PLAIN)));
    let (code, json) = examined(well.clone(), true).await;
    assert_eq!(code, 0);
    assert_eq!(serde_json::from_str::<DoctorReport>(&json).unwrap(), well);
    let ill = DoctorReport { ok: false, ..well };
    assert_eq!(examined(ill, true).await.0, 1);
}

#[test]
fn exit_codes_without_an_agent() {
    let silent = ClientError::Silent {
        socket: "/s".into(),
    };
    let gone = unreachable(io::ErrorKind::NotFound);
    let forbidden = unreachable(io::ErrorKind::PermissionDenied);
    let rights = Unsupported::Rights {
        missing: "BPF".to_owned(),
    };
    assert_eq!(exit_code(&gone, None), 3);
    assert_eq!(exit_code(&silent, None), 3);
    assert_eq!(exit_code(&gone, Some(&Unsupported::NoCgroup2)), 4);
    assert_eq!(exit_code(&gone, Some(&rights)), 4);
    assert_eq!(
        exit_code(&forbidden, Some(&rights)),
        3,
        "who may not ask is no judge"
    );
    assert_eq!(exit_code(&forbidden, Some(&Unsupported::NoCgroup2)), 4);
}

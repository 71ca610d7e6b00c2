//! What is refused, with the exact words.

use super::super::{load, parse_str};

/// Every problem of `text`, a line each.
fn refused(text: &str) -> String {
    parse_str("f.toml", text).expect_err("is wrong").to_string()
}

/// One problem each: what is written in `[defaults]`, and what is said about it.
#[test]
fn one_value_at_a_time() {
    let duration = "written like \"250ms\", \"2s\" or \"1m30s\"";
    let table = [
        ("timeouts.connect = 2", format!("defaults.timeouts.connect = 2: is a number without a unit; write it as \"2s\"; allowed: a duration from 50ms to 5m, {duration}")),
        ("timeouts.connect = \"2\"", format!("defaults.timeouts.connect = \"2\": is a number without a unit; write it as \"2s\"; allowed: a duration from 50ms to 5m, {duration}")),
        ("timeouts.connect = 0.5", format!("defaults.timeouts.connect = 0.5: is a number without a unit; write it as \"0.5s\"; allowed: a duration from 50ms to 5m, {duration}")),
        ("timeouts.connect = true", format!("defaults.timeouts.connect = true: must be a duration in quotes; allowed: a duration from 50ms to 5m, {duration}")),
        ("timeouts.connect = \"49ms\"", format!("defaults.timeouts.connect = \"49ms\": is out of range; allowed: a duration from 50ms to 5m, {duration}")),
        ("timeouts.connect = \"5m1s\"", format!("defaults.timeouts.connect = \"5m1s\": is out of range; allowed: a duration from 50ms to 5m, {duration}")),
        ("timeouts.connect = \"off\"", format!("defaults.timeouts.connect = \"off\": cannot be switched off; allowed: a duration from 50ms to 5m, {duration}")),
        ("timeouts.connect = \"100500us\"", format!("defaults.timeouts.connect = \"100500us\": is not a whole number of milliseconds; allowed: a duration from 50ms to 5m, {duration}")),
        ("timeouts.read = \"25h\"", format!("defaults.timeouts.read = \"25h\": is out of range; allowed: a duration from 1ms to 24h, {duration}, or \"off\"")),
        ("timeouts.read = \"0s\"", format!("defaults.timeouts.read = \"0s\": is out of range; allowed: a duration from 1ms to 24h, {duration}, or \"off\"")),
        ("timeouts.keepalive = \"500ms\"", format!("defaults.timeouts.keepalive = \"500ms\": is out of range; allowed: a duration from 1s to 9h, {duration}, or \"off\"")),
        ("timeouts.read_action = \"kill\"", "defaults.timeouts.read_action = \"kill\": is not a word that is known here; allowed: \"abort\", \"option\"".into()),
        ("timeouts = \"off\"", "defaults.timeouts = \"off\": must be a table; allowed: connect, read, write, deadline, stall, keepalive, read_action".into()),
        ("breaker.failure_rate = 0", "defaults.breaker.failure_rate = 0: is out of range; allowed: a number above 0, at most 1, or \"off\"".into()),
        ("breaker.failure_rate = 50", "defaults.breaker.failure_rate = 50: is out of range; allowed: a number above 0, at most 1, or \"off\"".into()),
        ("breaker.failure_rate = nan", "defaults.breaker.failure_rate = nan: is out of range; allowed: a number above 0, at most 1, or \"off\"".into()),
        ("breaker.failure_rate = \"50%\"", "defaults.breaker.failure_rate = \"50%\": must be a number; allowed: a number above 0, at most 1, or \"off\"".into()),
        ("breaker.window = 129", "defaults.breaker.window = 129: is out of range; allowed: a whole number from 1 to 128".into()),
        ("breaker.window = -1", "defaults.breaker.window = -1: is out of range; allowed: a whole number from 1 to 128".into()),
        ("breaker.window = 20.0", "defaults.breaker.window = 20.0: must be a whole number; allowed: a whole number from 1 to 128".into()),
        ("breaker.window = 9", "defaults.breaker.window = 9: is less than min_calls = 10, so no rate would ever be judged; allowed: a whole number from 10 to 128, or a smaller min_calls".into()),
        ("breaker.min_calls = 21", "defaults.breaker.min_calls = 21: is more than window = 20, so no rate would ever be judged; allowed: a whole number from 1 to 20, or a larger window".into()),
        ("breaker.min_calls = 0", "defaults.breaker.min_calls = 0: is out of range; allowed: a whole number from 1 to 128".into()),
        ("breaker.window_age = \"off\"", format!("defaults.breaker.window_age = \"off\": is no duration (expected number at 0); allowed: a duration from 1s to 1h, {duration}")),
        ("breaker.consecutive_failures = 129", "defaults.breaker.consecutive_failures = 129: is out of range; allowed: a whole number from 0 to 128, or \"off\"".into()),
        ("breaker.hung = \"never\"", format!("defaults.breaker.hung = \"never\": is no duration (expected number at 0); allowed: \"auto\", a duration from 1ms to 24h, {duration}, or \"off\"")),
        ("breaker.scope = 1", "defaults.breaker.scope = 1: must be a word in quotes; allowed: \"workload\", \"node\"".into()),
        ("breaker.cooldown = \"10m\"", "defaults.breaker.cooldown = \"10m\": is more than cooldown_max = 5m; allowed: a duration up to 5m, or a larger cooldown_max".into()),
        ("breaker.cooldown_max = \"10s\"", "defaults.breaker.cooldown_max = \"10s\": is less than cooldown = 30s; allowed: a duration from 30s to 1h".into()),
        ("breaker.redial = \"yes\"", "defaults.breaker.redial = \"yes\": must be true or false, without quotes; allowed: true, false".into()),
        ("breaker.probes = 0", "defaults.breaker.probes = 0: is out of range; allowed: a whole number from 1 to 1000".into()),
        ("breaker.successes_to_close = 1001", "defaults.breaker.successes_to_close = 1001: is out of range; allowed: a whole number from 1 to 1000".into()),
        ("breaker.max_open_share = 1.5", "defaults.breaker.max_open_share = 1.5: is out of range; allowed: a number from 0 to 1, or \"off\"".into()),
        ("breaker.failure_status = [\"5xx\", 200]", "defaults.breaker.failure_status = 200: is no status that can count as a failure; allowed: \"4xx\", \"5xx\", or a status from 400 to 599".into()),
        ("breaker.failure_status = \"5xx\"", "defaults.breaker.failure_status = \"5xx\": must be a list; allowed: a list of \"4xx\", \"5xx\", or a status from 400 to 599, or \"off\"".into()),
        ("breaker.errno = \"ECONNABORTED\"", "defaults.breaker.errno = \"ECONNABORTED\": is not a word that is known here; allowed: \"ECONNREFUSED\", \"ETIMEDOUT\", \"EHOSTUNREACH\", \"ENETUNREACH\", \"ECONNRESET\", \"EPERM\"".into()),
        ("breaker.coldown = \"1s\"", "defaults.breaker.coldown: unknown key; did you mean \"cooldown\"?; allowed: failure_rate, window, window_age, min_calls, consecutive_failures, slow_call, slow_call_rate, hung, gave_up, scope, cooldown, cooldown_max, redial, probes, successes_to_close, max_open_share, failure_status, on_open, errno".into()),
        ("breaker = true", "defaults.breaker = true: must be a table or \"off\"; allowed: failure_rate, window, window_age, min_calls, consecutive_failures, slow_call, slow_call_rate, hung, gave_up, scope, cooldown, cooldown_max, redial, probes, successes_to_close, max_open_share, failure_status, on_open, errno".into()),
        ("retry.limit = 101", "defaults.retry.limit = 101: is out of range; allowed: a whole number from 0 to 100, or \"off\"".into()),
        ("retry.backoff = { base = \"1s\" }", "defaults.retry.backoff.max: is missing; allowed: both, like { base = \"100ms\", max = \"10s\" }, or \"off\"".into()),
        ("retry.backoff = { base = \"1s\", max = \"500ms\" }", "defaults.retry.backoff.max = \"500ms\": is less than base = 1s; allowed: base at most max".into()),
        ("limits.pending = 0", "defaults.limits.pending = 0: is out of range; allowed: a whole number from 1 to 10000000, or \"off\"".into()),
        ("connect = \"1s\"", "defaults.connect: unknown key here; it belongs into \"timeouts\"; allowed: timeouts, breaker, retry, limits".into()),
        ("\"a b\" = 1", "defaults.\"a b\": unknown key; allowed: timeouts, breaker, retry, limits".into()),
    ];
    for (written, said) in table {
        assert_eq!(
            refused(&format!("[defaults]\n{written}")),
            format!("f.toml:2: {said}")
        );
    }
}

#[test]
fn agent_and_top_level() {
    let power = "a power of two from 65536 (64 KiB) to 67108864 (64 MiB)";
    let table = [
        ("mode = \"dry\"", "mode = \"dry\": is not a word that is known here; allowed: \"enforce\", \"observe\"".into()),
        ("mod = \"observe\"", "mod: unknown key; did you mean \"mode\"?; allowed: mode, defaults, policy, agent, protected".into()),
        ("max_destinations = 5", "max_destinations: unknown key here; it belongs into [agent]; allowed: mode, defaults, policy, agent, protected".into()),
        ("agent.max_destinations = 15", "agent.max_destinations = 15: is out of range; allowed: a whole number from 16 to 1000000".into()),
        ("agent.ring_bytes = 100000", format!("agent.ring_bytes = 100000: is no power of two; allowed: {power}")),
        ("agent.ring_bytes = 0x8000", format!("agent.ring_bytes = 0x8000: is out of range; allowed: {power}")),
        ("agent.events_kept = 1000001", "agent.events_kept = 1000001: is out of range; allowed: a whole number from 0 to 1000000".into()),
        ("policy = { name = \"x\" }", "policy = { name = \"x\" }: must be a list of tables; allowed: [[policy]]".into()),
        ("policy = [1]", "policy = 1: must be a table; allowed: [[policy]]".into()),
        ("mode = ", "is not TOML: string values must be quoted, expected literal string".into()),
        ("mode = \"observe\"\nmode = \"observe\"", "is not TOML: duplicate key".into()),
    ];
    for (written, said) in table {
        let line = if said.ends_with("duplicate key") {
            2
        } else {
            1
        };
        assert_eq!(refused(written), format!("f.toml:{line}: {said}"));
    }
}

#[test]
fn patterns() {
    let table = [
        (
            "10.0.0.1/8",
            "has bits set beyond its prefix length of 8; write it as \"10.0.0.0/8\"",
        ),
        (
            "::ffff:10.0.0.1/104",
            "has bits set beyond its prefix length of 8; write it as \"10.0.0.0/8\"",
        ),
        (
            "[2001:db8::1]/32:443",
            "has bits set beyond its prefix length of 32; write it as \"2001:db8::/32\"",
        ),
        (
            "10.0.0.0/33",
            "has the prefix length \"33\", which is no number from 0 to 32",
        ),
        (
            "2001:db8::/129",
            "has the prefix length \"129\", which is no number from 0 to 128",
        ),
        (
            "10.0.0.5:0",
            "has the port \"0\", which is no number from 1 to 65535",
        ),
        (
            "10.0.0.5:65536",
            "has the port \"65536\", which is no number from 1 to 65535",
        ),
        (
            "10.0.0.5:+80",
            "has the port \"+80\", which is no number from 1 to 65535",
        ),
        (
            "10.0.0.5:",
            "has the port \"\", which is no number from 1 to 65535",
        ),
        (
            "10.0.0.256",
            "has \"10.0.0.256\" where an IP address should stand",
        ),
        (
            "10.0.0:80",
            "has \"10.0.0\" where an IP address should stand",
        ),
        (
            "2001:db8::/32:443",
            "has a port after an IPv6 prefix; write it as \"[2001:db8::]/32:443\"",
        ),
        (
            "2001:db8:::1",
            "has \"2001:db8:::1\" where an IP address should stand",
        ),
        (
            "[10.0.0.1]:80",
            "has \"10.0.0.1\" where an IP address should stand",
        ),
        ("[::1:80", "has a \"[\" without a \"]\""),
        (
            "[::1]80",
            "has \"80\" after the \"]\", where only a prefix length and a port may stand",
        ),
        (
            "fe80::1%3",
            "names an interface, which no pattern may; leave \"%…\" away",
        ),
        (
            "0.0.0.0:80",
            "is the unspecified address, which reaches loopback; write \"127.0.0.1\" for that, or \"0.0.0.0/0\" for every address",
        ),
        (
            "::",
            "is the unspecified address, which reaches loopback; write \"::1\" for that, or \"::/0\" for every address",
        ),
        ("", "is empty"),
        (":80", "is empty"),
        (
            "*",
            "stands for everything; write \"0.0.0.0/0\" and \"[::]/0\" for every address",
        ),
        (
            "*:80",
            "stands for everything; write \"0.0.0.0/0\" and \"[::]/0\" for every address",
        ),
        (
            "db.*.internal",
            "has a \"*\" elsewhere than at the beginning, before a dot",
        ),
        (
            "*db.internal",
            "has a \"*\" elsewhere than at the beginning, before a dot",
        ),
        (
            "db internal",
            "holds ' ', which no host name does (an international name is written in its xn-- form)",
        ),
        (
            "bücher.example",
            "holds 'ü', which no host name does (an international name is written in its xn-- form)",
        ),
        (
            "db..internal",
            "has an empty label, or one longer than 63 characters, or one with a hyphen at an end",
        ),
        (
            "-db.internal",
            "has an empty label, or one longer than 63 characters, or one with a hyphen at an end",
        ),
        ("db.internal/24", "has a prefix length after a name"),
    ];
    for (written, said) in table {
        let all = refused(&format!("[protected]\ndestinations = [\n  {written:?},\n]"));
        let expected = format!("f.toml:3: protected.destinations = {written:?}: {said}; allowed: ");
        assert!(all.starts_with(&expected), "{all}\n{expected}");
        assert!(!all.contains('\n'), "one problem: {all}");
    }
}

#[test]
fn workload_patterns() {
    let table = [
        ("", "is empty"),
        (
            "/system.slice",
            "has a leading slash, which no workload has but the root \"/\"; write it as \"system.slice\"",
        ),
        (
            "//",
            "has a leading slash, which no workload has but the root \"/\"; write it as \"/\"",
        ),
        (
            "system.slice/",
            "ends with a slash, which no workload does but the root \"/\"",
        ),
        ("a\tb", "holds a control character"),
    ];
    for (written, said) in table {
        let all = refused(&format!(
            "[[policy]]\nname = \"w\"\nworkloads = [{written:?}]"
        ));
        let expected = format!("f.toml:3: policy[w].workloads = {written:?}: {said}; allowed: ");
        assert!(all.starts_with(&expected), "{all}\n{expected}");
    }
}

#[test]
fn everything_at_once_in_the_order_of_the_lines() {
    let text = r#"
mode = "strict"
[defaults.timeouts]
connect = 2
raed = "1s"
[[policy]]
name = "a"
destinations = ["10.0.0.1/8", "10.0.0.0/8", "db:0"]
breaker = { window = 5, probes = 0 }
[[policy]]
name = "a"
workloads = ["*"]
[[policy]]
name = "default"
[[policy]]
destinations = []
retry = "never"
[policy.timeouts]
connect = "off"
[agent]
ring_bytes = 65537
"#;
    let error = parse_str("f.toml", text).expect_err("is wrong");
    let said: Vec<_> = error
        .problems
        .iter()
        .map(|p| {
            (
                p.line,
                p.column,
                p.key.as_str(),
                p.value.as_str(),
                p.what.as_str(),
            )
        })
        .collect();
    assert_eq!(
        said,
        [
            (
                2,
                8,
                "mode",
                "\"strict\"",
                "is not a word that is known here"
            ),
            (
                4,
                11,
                "defaults.timeouts.connect",
                "2",
                "is a number without a unit; write it as \"2s\""
            ),
            (
                5,
                1,
                "defaults.timeouts.raed",
                "",
                "unknown key; did you mean \"read\"?"
            ),
            (
                8,
                17,
                "policy[a].destinations",
                "\"10.0.0.1/8\"",
                "has bits set beyond its prefix length of 8; write it as \"10.0.0.0/8\""
            ),
            (
                8,
                45,
                "policy[a].destinations",
                "\"db:0\"",
                "has the port \"0\", which is no number from 1 to 65535"
            ),
            (
                9,
                22,
                "policy[a].breaker.window",
                "5",
                "is less than min_calls = 10, so no rate would ever be judged"
            ),
            (9, 34, "policy[a].breaker.probes", "0", "is out of range"),
            (
                11,
                8,
                "policy[a].name",
                "\"a\"",
                "is the name of two policies, on lines 7 and 11"
            ),
            (
                13,
                1,
                "policy[3].destinations",
                "",
                "has neither destinations nor workloads, so it would apply to everything; that is what [defaults] is for"
            ),
            (
                14,
                8,
                "policy[3].name",
                "\"default\"",
                "is the name of the defaults"
            ),
            (15, 1, "policy[4].name", "", "is missing"),
            (
                16,
                16,
                "policy[4].destinations",
                "[]",
                "is empty, so the policy would apply to nothing; leave destinations away for all"
            ),
            (
                17,
                9,
                "policy[4].retry",
                "\"never\"",
                "must be a table or \"off\""
            ),
            (
                19,
                11,
                "policy[4].timeouts.connect",
                "\"off\"",
                "cannot be switched off"
            ),
            (21, 14, "agent.ring_bytes", "65537", "is no power of two"),
        ]
    );
    assert_eq!(error.to_string().lines().count(), said.len());
}

/// One bad value is one problem, even where it would not fit its neighbour either.
#[test]
fn a_bad_value_is_not_compared() {
    let all = refused(
        "[defaults.breaker]\nwindow = 999\nmin_calls = 60\ncooldown = 5\ncooldown_max = \"1s\"",
    );
    let lines: Vec<_> = all.lines().map(|line| line.split(':').nth(1)).collect();
    assert_eq!(lines, [Some("2"), Some("4")], "{all}");
}

#[test]
fn long_values_are_cut_to_one_line() {
    let text = format!("mode = [\n  \"{}\",\n]", "x".repeat(500));
    let error = parse_str("f.toml", &text).expect_err("is wrong");
    assert_eq!(error.problems[0].value, format!("[ \"{}…", "x".repeat(57)));
}

#[test]
fn columns_count_characters() {
    let error = parse_str("f.toml", "agent = { \"ü\" = 1, log = 1 }").expect_err("is wrong");
    let columns: Vec<_> = error
        .problems
        .iter()
        .map(|problem| problem.column)
        .collect();
    assert_eq!(columns, [11, 26]);
}

#[test]
fn too_many_kernel_entries() {
    // 200 prefixes without a port, each of which counts for each of 100 ports, too.
    let prefixes: Vec<_> = (0..200).map(|i| format!("\"10.{i}.0.0/16\"")).collect();
    let ports: Vec<_> = (1..=100)
        .map(|port| format!("\"10.0.0.0/8:{port}\""))
        .collect();
    let text = format!(
        "[[policy]]\nname = \"a\"\ndestinations = [{}, {}]",
        prefixes.join(", "),
        ports.join(", ")
    );
    let all = refused(&text);
    let expected = "f.toml:1: policy: the destinations make 20304 entries in the kernel, where \
        every prefix without a port counts once more for each port that any policy names; \
        allowed: at most 16384";
    assert_eq!(all, expected);
}

#[test]
fn files_that_cannot_be_read() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let missing = folder.path().join("missing.toml");
    let error = load(&missing).expect_err("is missing");
    let expected = format!(
        "{}: the configuration file cannot be read: No such file or directory (os error 2)",
        missing.display()
    );
    assert_eq!(error.to_string(), expected);

    let error = load(folder.path()).expect_err("is a folder");
    assert!(
        error
            .to_string()
            .ends_with("cannot be read: not a regular file"),
        "{error}"
    );

    let binary = folder.path().join("binary.toml");
    std::fs::write(&binary, b"mode = \"observe\"\n\xff\n").expect("written");
    let error = load(&binary).expect_err("is not UTF-8");
    assert!(
        error.to_string().contains("is not UTF-8 from line 2 on"),
        "{error}"
    );

    let large = folder.path().join("large.toml");
    std::fs::write(&large, "#".repeat((1 << 20) + 1)).expect("written");
    let error = load(&large).expect_err("is too large");
    assert!(
        error
            .to_string()
            .ends_with("is too large; allowed: at most 1048576 bytes"),
        "{error}"
    );
}

#[test]
fn a_pipe_is_refused_at_once() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let pipe = folder.path().join("pipe.toml");
    rustix::fs::mknodat(
        rustix::fs::CWD,
        &pipe,
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::RUSR,
        0,
    )
    .expect("a pipe");
    let error = load(&pipe).expect_err("is a pipe");
    assert!(error.to_string().ends_with("not a regular file"), "{error}");
}

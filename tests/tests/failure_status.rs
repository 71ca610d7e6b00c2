//! `failure_status`: exactly the statuses that a policy lists are failures.

use std::{io::Write as _, net::TcpStream, time::Duration};

use serde_json::{Value, json};
use tests::{
    agent::Agent,
    cgroup::TestCgroup,
    interpreter::Interpreter,
    need,
    net::TestNet,
    nginx::Nginx,
    outcome::{expect, judged},
    process::Program,
    server::Server,
    talk::{DESTINATION, TO, read_byte},
    wait,
};

/// What nginx is asked for, in this order.
const STATUSES: [u16; 9] = [200, 301, 404, 429, 400, 500, 502, 503, 504];
/// What it answers to `/later`: a 503 with Retry-After.
const LATER: &str = "/later";

/// Counts and judges, never opens.
fn config(list: &str) -> String {
    format!(
        "[defaults.breaker]\nfailure_rate = \"off\"\nconsecutive_failures = 0\nfailure_status = {list}\n"
    )
}

struct Scene {
    _nginx: Nginx,
    net: TestNet,
    group: TestCgroup,
    agent: Agent,
}

impl Scene {
    fn new(label: &str, list: &str) -> Self {
        let net = TestNet::new();
        let mut server = format!("listen {TO};");
        for status in STATUSES {
            server += &format!(" location = /{status} {{ return {status} 'said'; }}");
        }
        server += &format!(
            " location = {LATER} {{ add_header Retry-After 5 always; return 503 'said'; }}"
        );
        let nginx = Nginx::start(&net.server, TO, &server);
        let group = TestCgroup::new(label);
        let agent = Agent::start(&group, &config(list));
        Self {
            _nginx: nginx,
            net,
            group,
            agent,
        }
    }

    /// Asks for each of these paths once, on one connection.
    fn ask(&self, paths: impl Iterator<Item = String>) {
        let curl = Program::new("curl").args(["-q", "-sS"]);
        let curl = curl.in_cgroup(&self.group).in_netns(&self.net.client);
        let urls = paths.map(|path| format!("http://{TO}{path}"));
        let said = curl.args(urls).run().good();
        assert!(said.starts_with("said"), "{said}");
    }

    fn ask_all(&self) {
        let paths = STATUSES.map(|status| format!("/{status}"));
        self.ask(paths.into_iter().chain([LATER.to_owned()]));
    }

    /// Waits for so many answers; what was counted of them.
    #[track_caller]
    fn counted(&self, responses: u64) -> (Value, Value, (u64, u64)) {
        let row = self.agent.wait_row(DESTINATION, "all answers", |row| {
            row["in_flight"] == 0 && row["responses"] == responses
        });
        let failures = row["failures"]["status"].clone();
        (failures, row["throttled"].clone(), judged(&row))
    }
}

/// How many of the answers to [`Scene::ask_all`] each list takes for failures. Whatever it is, two of them ask
/// for fewer calls: the 429 and the 503 with Retry-After.
const LISTS: [(&str, u64); 9] = [
    (r#"["5xx"]"#, 5),
    ("[500, 503]", 3),
    (r#"["5xx", 429]"#, 6),
    ("[404]", 1),
    ("[]", 0),
    ("\"off\"", 0),
    (r#"["4xx"]"#, 3),
    (r#"["4xx", "5xx"]"#, 8),
    ("[599, 400, 504, 400]", 2),
];

/// Each list in turn, by a reload: what was counted before stays.
#[test]
fn exactly_what_is_listed_counts() {
    need!("nginx", "curl");
    let scene = Scene::new("statuses", LISTS[0].0);
    let all = STATUSES.len() as u64 + 1;
    let (mut answers, mut failed, mut throttled) = (0, 0, 0);
    for (list, failures) in LISTS {
        scene.agent.home().write_config(&config(list));
        scene.agent.request("POST", "/v1/reload");
        scene.ask_all();
        (answers, failed, throttled) = (answers + all, failed + failures, throttled + 2);
        let (status, asked_for_fewer, _) = scene.counted(answers);
        assert_eq!(status, failed, "{list}");
        assert_eq!(asked_for_fewer, throttled, "{list}");
    }
    let log = scene.agent.log();
    assert!(!log.contains("not enforced"), "{log}");
}

/// They are failures for the window, too, and so for the breaker; `explain` says which they are.
#[test]
fn a_breaker_opens_on_what_is_listed() {
    need!("nginx", "curl");
    let scene = Scene::new("statuses-open", "[404]");
    scene.ask_all();
    let (status, _, calls) = scene.counted(10);
    assert_eq!((status, calls), (json!(1), (10, 1)));
    let explained = scene
        .agent
        .command(&["explain", DESTINATION, "--json"])
        .good();
    let explained: Value = serde_json::from_str(&explained).expect("JSON");
    let settings = explained["settings"].as_array().expect("a list");
    let shown = settings
        .iter()
        .find(|one| one["key"] == "breaker.failure_status");
    assert_eq!(shown.expect("shown")["value"], "404", "{explained:#}");

    let opens = "[defaults.breaker]\nfailure_rate = \"off\"\nfailure_status = [404]\n";
    scene.agent.home().write_config(opens);
    scene.agent.request("POST", "/v1/reload");
    scene.ask(["/500", "/503"].repeat(5).into_iter().map(str::to_owned));
    let (status, ..) = scene.counted(20);
    assert_eq!(status, 1);
    assert_eq!(scene.agent.row(DESTINATION)["state"], "closed");
    scene.ask(vec!["/404"; 5].into_iter().map(str::to_owned));
    wait::until("the breaker to open", Duration::from_secs(60), || {
        (scene.agent.row(DESTINATION)["state"] == "open").then_some(())
    });
}

/// A policy has a list of its own.
#[test]
fn of_the_policy_that_applies() {
    need!("nginx", "curl");
    let scene = Scene::new("statuses-policy", "[404]");
    let policy = format!(
        "{}[[policy]]\nname = \"own\"\ndestinations = [\"{DESTINATION}\"]\n\
         breaker = {{ failure_status = [502, 504] }}\n",
        config("[404]")
    );
    scene.agent.home().write_config(&policy);
    scene.agent.request("POST", "/v1/reload");
    scene.ask_all();
    let (status, ..) = scene.counted(10);
    assert_eq!(status, 2);
}

/// What servers of other protocols say counts as a 503, or, if they ask for fewer calls, as a 429.
#[test]
fn other_protocols_have_their_counterparts() {
    need!("python3");
    fn loading(mut stream: TcpStream) {
        while read_byte(&mut stream) {
            let _ = stream.write_all(b"-LOADING Redis is loading the dataset in memory\r\n");
        }
    }
    for (list, counts) in [
        ("[503]", true),
        (r#"["5xx"]"#, true),
        ("[500, 502]", false),
        ("[404, 429]", false),
    ] {
        let net = TestNet::new();
        let _server = Server::with(&net.server, TO, loading);
        let group = TestCgroup::new("statuses-redis");
        let agent = Agent::start(&group, &config(list));
        let mut python = Interpreter::start(&group, &net.client);
        python.value(tests::talk::CONNECT);
        assert_eq!(
            python.value("s.sendall(b'x') or s.recv(99)[:8].decode()"),
            "-LOADING"
        );
        let wanted: &[_] = if counts {
            &[("responses", 1), ("status", 1)]
        } else {
            &[("responses", 1)]
        };
        expect(&agent, DESTINATION, wanted);
    }
}

/// A proxy that answers 502 for a dead site is well, whatever is listed; what it says of itself counts.
#[test]
fn what_a_proxy_says_of_others_is_no_failure() {
    need!("nginx", "curl", "python3");
    let scene = Scene::new("statuses-proxy", r#"["4xx", "5xx"]"#);
    // nginx takes no notice of the site's name, and answers what the path says.
    let ask = |url: &str| {
        let curl = Program::new("curl").args(["-q", "-sS", "-x", &format!("http://{TO}")]);
        let curl = curl.in_cgroup(&scene.group).in_netns(&scene.net.client);
        assert_eq!(curl.arg(url).run().good(), "said");
    };
    for status in [502, 503, 504, 429, 404, 200] {
        ask(&format!("http://dead.example/{status}"));
    }
    ask(&format!("http://dead.example{LATER}"));
    let (status, throttled, calls) = scene.counted(7);
    assert_eq!((status, throttled, calls), (json!(0), json!(0), (7, 0)));
    // It goes by the request, not by the connection.
    let mut python = Interpreter::start(&scene.group, &scene.net.client);
    python.value(tests::talk::CONNECT);
    python.run("def whole(said=b''):\n    while not said.endswith(b'said'):\n        said += s.recv(999) or b'said'\n    return said[:5].decode()");
    let requests = [
        ("http://dead.example/502", 0),
        ("/502", 1),
        ("http://dead.example/503", 1),
        ("/404", 2),
    ];
    for (number, (target, failed)) in (8..).zip(requests) {
        let request = format!("GET {target} HTTP/1.1\\r\\nHost: dead.example\\r\\n\\r\\n");
        python.value(&format!("s.sendall(b'{request}')"));
        assert_eq!(python.value("whole()"), "HTTP/");
        let (status, _, calls) = scene.counted(number);
        assert_eq!(
            (status, calls),
            (json!(failed), (number, failed)),
            "{target}"
        );
    }
}

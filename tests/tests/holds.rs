//! SYNs that are held: retries that wait their turn, and refusals of a task that spins.

use std::{net::SocketAddr, time::Duration};

use serde_json::Value;
use tests::{
    agent::Agent, cgroup::TestCgroup, interpreter::Interpreter, net::TestNet, server::Server, wait,
};

const TO: SocketAddr = TestNet::server4(8080);
const DESTINATION: &str = "10.77.0.2:8080";
const ECONNREFUSED: i64 = 111;
const ETIMEDOUT: i64 = 110;

struct Scene {
    net: TestNet,
    agent: Agent,
    python: Interpreter,
    group: TestCgroup,
}

impl Scene {
    fn new(config: &str) -> Self {
        let net = TestNet::new();
        let group = TestCgroup::new("holds");
        let agent = Agent::start(&group, config);
        let mut python = Interpreter::start(&group, &net.client);
        python.run(
            "import errno, time\nTO = ('10.77.0.2', 8080)\n\
             def options(s):\n return [s.getsockopt(6, name) for name in (18, 7)]\n\
             def attempt():\n s = socket.socket()\n began = time.monotonic()\n \
             e = s.connect_ex(TO)\n took = time.monotonic() - began\n o = options(s)\n s.close()\n \
             return [e, int(took * 1e6), o]\n\
             BEFORE = options(socket.socket())",
        );
        Self {
            net,
            agent,
            python,
            group,
        }
    }

    fn row(&self) -> Value {
        quiet(&self.agent)
    }

    fn attempt(&mut self) -> (i64, u64, bool) {
        attempt(&mut self.python)
    }
}

/// Errno, time (us), and whether the socket has its options back.
fn attempt(python: &mut Interpreter) -> (i64, u64, bool) {
    let told = python.value("attempt()");
    let before = python.value("BEFORE");
    let number = |value: &Value| value.as_u64().expect("a number");
    (
        number(&told[0]).cast_signed(),
        number(&told[1]),
        told[2] == before,
    )
}

fn quiet(agent: &Agent) -> Value {
    agent.wait_row(DESTINATION, "quiet", |row| row["in_flight"] == 0)
}

#[test]
fn a_task_that_spins_is_held() {
    let mut scene = Scene::new("[defaults.breaker]\nredial = false\n");
    scene.attempt();
    scene
        .agent
        .command(&["trip", DESTINATION, "--for", "1m"])
        .good();
    let told = scene.python.value("[attempt() for _ in range(108)]");
    let before = scene.python.value("BEFORE");
    let mut holds = Vec::new();
    for (number, attempt) in told.as_array().expect("a list").iter().enumerate() {
        let took_ms = attempt[1].as_u64().expect("a number") / 1000;
        assert_eq!(attempt[2], before, "options after attempt {number}");
        let expected = if number < 100 {
            ECONNREFUSED
        } else {
            ETIMEDOUT
        };
        assert_eq!(attempt[0], expected, "attempt {number}");
        if number >= 100 {
            holds.push(took_ms);
        }
    }
    // 10 ms, doubling to 200; on a busy machine it pauses by itself, and the next hold is no longer.
    let expected = [10, 20, 40, 80, 160, 200, 200, 200];
    for (hold, most) in holds.iter().zip(expected) {
        assert!((10..most + 60).contains(hold), "{holds:?}");
    }
    let row = scene.row();
    assert_eq!(row["held"]["spin"], 8, "{row:#}");
    assert_eq!(row["rejected"]["breaker"], 108, "{row:#}");
    assert_eq!(row["attempts"], 1, "{row:#}");
    assert_eq!(row["failures"]["connect_timeout"], 0, "{row:#}");
    let labels = ["reason=\"spin\"".to_owned()];
    assert_eq!(
        scene.agent.metric("backstop_held_total", &labels),
        Some(8.0)
    );
    // Another task is not to blame; what it dials elsewhere is not held.
    let code =
        "def elsewhere():\n s = socket.socket()\n e = s.connect_ex(('10.77.0.2', 8081))\n return e";
    scene.python.run(code);
    assert_eq!(scene.python.value("elsewhere()"), ECONNREFUSED);
    let other = "[r := [], (t := __import__('threading').Thread(target=lambda: r.append(attempt()))).start(), \
                 t.join()] and r[0][0]";
    assert_eq!(scene.python.value(other), ECONNREFUSED);
}

#[test]
fn a_loop_of_refusals_is_no_hot_loop() {
    let mut scene = Scene::new("[defaults.breaker]\nredial = false\n");
    scene.attempt();
    scene
        .agent
        .command(&["trip", DESTINATION, "--for", "1m"])
        .good();
    let code = "def loop():\n n = 0\n ends = time.monotonic() + 3\n cpu = time.process_time()\n \
                while time.monotonic() < ends:\n  attempt()\n  n += 1\n \
                return [n, time.process_time() - cpu]";
    scene.python.run(code);
    let told = scene.python.value("loop()");
    // A hundred at once, then at most 5 in a second but for the first few; on a busy machine, where it
    // seems to pause by itself, now and then a hundred more.
    assert!(told[0].as_u64().expect("a number") < 330, "{told}");
}

#[test]
fn a_program_may_close_or_poll_while_it_is_held() {
    let mut scene =
        Scene::new("[defaults.breaker]\nredial = false\n[defaults.retry]\nspin_per_second = 1\n");
    scene.attempt();
    scene
        .agent
        .command(&["trip", DESTINATION, "--for", "1m"])
        .good();
    scene.attempt();
    let code = "def polled():\n s = socket.socket()\n s.setblocking(False)\n e = s.connect_ex(TO)\n \
                __import__('select').select([], [s], [], 5)\n \
                return [e, s.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR), options(s) == BEFORE]\n\
                def closed():\n s = socket.socket()\n s.setblocking(False)\n e = s.connect_ex(TO)\n s.close()\n \
                return e";
    scene.python.run(code);
    for _ in 0..3 {
        let told = scene.python.value("polled()");
        assert_eq!(told, serde_json::json!([115, ETIMEDOUT, true]), "{told}");
    }
    assert_eq!(scene.python.value("closed()"), 115);
    let row = scene.row();
    assert_eq!(row["held"]["spin"], 4, "{row:#}");
    assert_eq!(row["abandoned"], 0, "{row:#}");
}

/// Retries without a limit, held for up to so long.
fn backoff(base: &str, max: &str) -> String {
    format!(
        "[defaults]\nbreaker = \"off\"\n[defaults.timeouts]\nconnect = \"1s\"\n[defaults.retry]\nlimit = \"off\"\n\
         budget = \"off\"\nbackoff = {{ base = \"{base}\", max = \"{max}\" }}\n"
    )
}

#[test]
fn retries_wait_with_jitter() {
    let mut scene = Scene::new(&backoff("40ms", "160ms"));
    let mut waits = Vec::new();
    for number in 0..40 {
        let (errno, took, has_its_options) = scene.attempt();
        assert_eq!(errno, ECONNREFUSED);
        assert!(has_its_options, "attempt {number}");
        waits.push(took / 1000);
    }
    // (Beyond it only what a busy machine adds, and not to all of them.)
    let late = waits.iter().filter(|&&wait| wait > 200).count();
    assert!(late <= 4, "{waits:?}");
    // Uniform up to 160 ms: of 37, none of the quarters has fewer than two.
    for quarter in 0..4 {
        let within = quarter * 40..quarter * 40 + 45;
        let count = waits[3..]
            .iter()
            .filter(|&&wait| within.contains(&wait))
            .count();
        assert!(count >= 2, "{waits:?}");
    }
    let row = scene.row();
    assert_eq!(row["attempts"], 40, "{row:#}");
    assert_eq!(row["failures"]["refused"], 40, "{row:#}");
    let held = row["held"]["backoff"].as_u64().expect("a number");
    assert!((30..=39).contains(&held), "{row:#}");
    // The latency counts from when the SYN left.
    let _server = Server::start(&scene.net.server, TO);
    let told = scene.python.value(
        "(s := socket.socket(), e := s.connect_ex(TO), options(s) == BEFORE, s.close()) and [e, s is not None]",
    );
    assert_eq!(told[0], 0, "{told}");
    let row = scene.row();
    assert!(
        row["connect_latency_us"]["max"].as_u64() < Some(30_000),
        "{row:#}"
    );
}

#[test]
fn a_held_connect_to_a_silent_host_ends_in_time() {
    let Scene {
        net,
        agent,
        mut python,
        group: _group,
    } = Scene::new(&backoff("20ms", "200ms"));
    attempt(&mut python);
    let syns = net.server.count_syns(8080, true);
    for _ in 0..4 {
        let before = syns.seen();
        let (errno, took, has_its_options) = attempt(&mut python);
        assert_eq!(errno, ETIMEDOUT);
        assert!((950_000..1_350_000).contains(&took), "{took} us");
        assert!(has_its_options);
        let sent = syns.seen() - before;
        assert!((1..=2).contains(&sent), "{sent} SYNs");
    }
    let row = quiet(&agent);
    assert_eq!(row["failures"]["connect_timeout"], 4, "{row:#}");
}

#[test]
fn a_stop_gives_back_the_options_of_what_is_held() {
    let Scene {
        net: _net,
        agent,
        mut python,
        group: _group,
    } = Scene::new(&backoff("60s", "60s"));
    attempt(&mut python);
    python.run("s = socket.socket()\ns.setblocking(False)\ne = s.connect_ex(TO)");
    assert_eq!(python.value("e"), 115);
    agent.wait_row(DESTINATION, "held", |row| {
        row["held"]["backoff"] == 1 && row["in_flight"] == 1
    });
    assert_eq!(python.value("options(s) == BEFORE"), false);
    agent.stop();
    assert_eq!(python.value("options(s) == BEFORE"), true);
}

#[test]
fn only_so_many_are_held() {
    let config = format!("{}max_held = 3\n", backoff("60s", "60s"));
    let mut scene = Scene::new(&config);
    scene.python.run(
        "def fail():\n s = socket.socket()\n s.connect_ex(TO)\n s.close()\n\
         def begin():\n fail()\n s = socket.socket()\n s.setblocking(False)\n e = s.connect_ex(TO)\n \
         KEPT.append(s)\n return e\nKEPT = []\n\
         def thread():\n r = []\n t = __import__('threading').Thread(target=lambda: r.append(begin()))\n \
         t.start()\n t.join()\n return r[0]",
    );
    for expected in [115, 115, 115, 111, 111] {
        assert_eq!(scene.python.value("thread()"), expected);
    }
    scene.python.run("[s.close() for s in KEPT]");
    let row = wait::until("all gone", Duration::from_secs(5), || {
        let row = scene.agent.rows(DESTINATION).remove(0);
        (row["in_flight"] == 0).then_some(row)
    });
    assert_eq!(row["held"]["backoff"], 3, "{row:#}");
    assert_eq!(row["abandoned"], 3, "{row:#}");
    // Their places are free again.
    assert_eq!(scene.python.value("thread()"), 115);
}

#[test]
fn the_deadline_is_of_the_whole_operation() {
    let config = "[defaults]\nbreaker = \"off\"\n[defaults.timeouts]\nconnect = \"400ms\"\ndeadline = \"700ms\"\n\
                  [defaults.retry]\nlimit = \"off\"\nbudget = \"off\"\n";
    let Scene {
        net,
        agent,
        mut python,
        group: _group,
    } = Scene::new(config);
    let _syns = net.server.count_syns(8080, true);
    let (errno, took, _) = attempt(&mut python);
    assert_eq!(errno, ETIMEDOUT);
    assert!((400_000..650_000).contains(&took), "{took} us");
    // What is left of it.
    let (errno, took, _) = attempt(&mut python);
    assert_eq!(errno, ETIMEDOUT);
    assert!((40_000..400_000).contains(&took), "{took} us");
    // It is used up.
    let (errno, took, _) = attempt(&mut python);
    assert_eq!(errno, ETIMEDOUT);
    assert!(took < 50_000, "{took} us");
    // Or all but a few milliseconds of it were.
    let (errno, ..) = attempt(&mut python);
    assert_eq!(errno, ETIMEDOUT);
    let row = quiet(&agent);
    assert!(row["attempts"].as_u64() <= Some(3), "{row:#}");
    assert!(row["rejected"]["deadline"].as_u64() >= Some(1), "{row:#}");
    let events = agent.command(&["events", "--json"]).good();
    assert!(events.contains("\"reason\":\"deadline\""), "{events}");
}

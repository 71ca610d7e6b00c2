//! SYNs that are held: retries that wait their turn, and refusals of a task that spins.

use std::{net::SocketAddr, time::Duration};

use serde_json::Value;
use tests::{
    agent::Agent, cgroup::TestCgroup, interpreter::Interpreter, net::TestNet, server::Server, wait,
};

const TO: SocketAddr = TestNet::server4(8080);
const DESTINATION: &str = "10.77.0.2:8080";
/// Whatever else a busy machine does, one of so many times is as expected.
const TRIES: u32 = 15;
const ECONNREFUSED: i64 = 111;
const ETIMEDOUT: i64 = 110;

/// For what comes by itself, on a busy machine.
const SOON: Duration = Duration::from_secs(60);

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
        let python = program(&group, &net);
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

/// A program of which nothing is known.
fn program(group: &TestCgroup, net: &TestNet) -> Interpreter {
    let mut python = Interpreter::start(group, &net.client);
    python.run(
        "import errno, time\nTO = ('10.77.0.2', 8080)\n\
         def options(s):\n return [s.getsockopt(6, name) for name in (18, 7)]\n\
         def attempt():\n s = socket.socket()\n began = time.monotonic()\n \
         e = s.connect_ex(TO)\n took = time.monotonic() - began\n o = options(s)\n s.close()\n \
         return [e, int(took * 1e6), o]\n\
         BEFORE = options(socket.socket())",
    );
    python
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
    // (The default is 100: a busy machine may not come to that.)
    let mut scene =
        Scene::new("[defaults.breaker]\nredial = false\n[defaults.retry]\nspin_per_second = 20\n");
    scene.attempt();
    scene
        .agent
        .command(&["trip", DESTINATION, "--for", "30m"])
        .good();
    let before = scene.python.value("BEFORE");
    // Each time another task, of which nothing is known. On a busy machine one pauses by itself, and then
    // it is not held, or no longer than before.
    scene.python.run(
        "def spin():\n r = []\n t = __import__('threading').Thread(target=lambda: \
         r.extend(attempt() for _ in range(28)))\n t.start()\n t.join()\n return r",
    );
    let (mut refusals, mut held) = (0, 0);
    let is_held = (0..TRIES).any(|_| {
        let told = scene.python.value("spin()");
        let mut holds = Vec::new();
        let mut is_as_expected = true;
        for (number, attempt) in told.as_array().expect("a list").iter().enumerate() {
            let took_ms = attempt[1].as_u64().expect("a number") / 1000;
            assert_eq!(attempt[2], before, "options after attempt {number}");
            let expected = if number < 20 { ECONNREFUSED } else { ETIMEDOUT };
            is_as_expected &= attempt[0] == expected;
            refusals += 1;
            if attempt[0] == ETIMEDOUT {
                assert!(number >= 20, "attempt {number}: {told}");
                assert!(took_ms > 0, "attempt {number}: {told}");
                held += 1;
                holds.push(took_ms);
            }
        }
        // 10 ms, doubling to 200.
        let expected = [10, 20, 40, 80, 160, 200, 200, 200];
        eprintln!("held for {holds:?} ms");
        let mut all = holds.iter().zip(expected);
        is_as_expected && all.all(|(hold, most)| (10..most + 60).contains(hold))
    });
    assert!(is_held, "never as expected in {TRIES} tries");
    let row = scene.row();
    assert_eq!(row["held"]["spin"], held, "{row:#}");
    assert_eq!(row["rejected"]["breaker"], refusals, "{row:#}");
    assert_eq!(row["attempts"], 1, "{row:#}");
    assert_eq!(row["failures"]["connect_timeout"], 0, "{row:#}");
    let labels = ["reason=\"spin\"".to_owned()];
    assert_eq!(
        scene.agent.metric("backstop_held_total", &labels),
        Some(f64::from(held))
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
        .command(&["trip", DESTINATION, "--for", "30m"])
        .good();
    let code = "def loop():\n n = 0\n ends = time.monotonic() + 3\n cpu = time.process_time()\n \
                while time.monotonic() < ends:\n  attempt()\n  n += 1\n \
                return [n, time.process_time() - cpu]";
    // A hundred at once, then at most 5 in a second but for the first few; on a busy machine, where it
    // seems to pause by itself, now and then a hundred more.
    let is_slow = (0..TRIES).any(|_| {
        let mut python = program(&scene.group, &scene.net);
        python.run(code);
        let told = python.value("loop()");
        eprintln!("{told}");
        told[0].as_u64().expect("a number") < 330
    });
    assert!(is_slow, "a hot loop in each of {TRIES} tries");
}

/// A loop that is held pauses for longer than it did before, and is the same operation all the same.
#[test]
fn a_loop_that_is_held_has_its_limit() {
    let scene = Scene::new(
        "[defaults]\nbreaker = \"off\"\n\
         [defaults.retry]\nlimit = 1\nbudget = \"off\"\nwindow = \"2s\"\nspin_per_second = 20\n",
    );
    let code = "def loop():\n n = 0\n begin = time.monotonic()\n \
                while time.monotonic() < begin + 7:\n  attempt()\n  n += 1\n \
                return [n, int((time.monotonic() - begin) * 1000)]";
    // Each time another program. On a busy machine one pauses by itself, and begins anew.
    let (mut attempts, mut held) = (0, 0);
    let is_limited = (0..TRIES).any(|_| {
        let mut python = program(&scene.group, &scene.net);
        python.run(code);
        let told = python.value("loop()");
        let took_ms = told[1].as_u64().expect("a number");
        let row = scene.row();
        let before = (attempts, held);
        attempts = row["attempts"].as_u64().expect("a count");
        held = row["held"]["spin"].as_u64().expect("a count");
        let (more, more_held) = (attempts - before.0, held - before.1);
        eprintln!("{told}: {more} attempts, {more_held} held");
        // Two for each window; it began with one.
        more <= 2 * (took_ms / 2000 + 1) && more_held > 3
    });
    assert!(is_limited, "never as expected in {TRIES} tries");
}

#[test]
fn a_program_may_close_or_poll_while_it_is_held() {
    let mut scene =
        Scene::new("[defaults.breaker]\nredial = false\n[defaults.retry]\nspin_per_second = 1\n");
    scene.attempt();
    scene
        .agent
        .command(&["trip", DESTINATION, "--for", "30m"])
        .good();
    let code = "def polled():\n s = socket.socket()\n s.setblocking(False)\n e = s.connect_ex(TO)\n \
                __import__('select').select([], [s], [], 60)\n \
                return [e, s.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR), options(s) == BEFORE]\n\
                def closed():\n s = socket.socket()\n s.setblocking(False)\n e = s.connect_ex(TO)\n s.close()\n \
                return e";
    scene.python.run(code);
    // Each time another task. On a busy machine one pauses by itself, and is not held.
    scene.python.run(
        "def both():\n r = []\n t = __import__('threading').Thread(target=lambda: r.extend(\
         [attempt()[0], *(polled() for _ in range(3)), closed()]))\n t.start()\n t.join()\n return r",
    );
    let polled = serde_json::json!([115, ETIMEDOUT, true]);
    let expected = serde_json::json!([ECONNREFUSED, polled, polled, polled, 115]);
    let mut held = 0;
    let is_held = (0..TRIES).any(|_| {
        let told = scene.python.value("both()");
        eprintln!("{told}");
        let all = told.as_array().expect("a list");
        let begun = |one: &&Value| **one == 115 || one[0] == 115;
        held += all.iter().filter(begun).count() as u64;
        told == expected
    });
    assert!(is_held, "never as expected in {TRIES} tries");
    let row = scene.row();
    assert_eq!(row["held"]["spin"], held, "{row:#}");
    assert_eq!(row["abandoned"], 0, "{row:#}");
}

#[test]
fn a_pause_lets_go_what_spins() {
    let mut scene =
        Scene::new("[defaults.breaker]\nredial = false\n[defaults.retry]\nspin_per_second = 1\n");
    let _server = Server::start(&scene.net.server, TO);
    scene.attempt();
    scene
        .agent
        .command(&["trip", DESTINATION, "--for", "30m"])
        .good();
    // Each task ends with its first connect that is established. What is held gives up after 200 ms, or would
    // after the 13 s of the kernel's own SYNs.
    scene.python.run(
        "threads = []\ntook = []\n\
         def loop():\n e = -1\n while e != 0:\n  e, us, o = attempt()\n  took.append(us)\n\
         def start():\n for _ in range(8):\n  \
         threads.append(__import__('threading').Thread(target=loop))\n  threads[-1].start()\n\
         def ends():\n for t in threads: t.join()\n return max(took)",
    );
    scene.python.run("start()");
    scene
        .agent
        .wait_row(DESTINATION, "all of them held, for long", |row| {
            row["held"]["spin"].as_u64() >= Some(80)
        });
    scene.agent.command(&["pause"]).good();
    let longest_us = scene.python.value("ends()").as_u64().expect("a number");
    assert!(longest_us < 8_000_000, "one took {longest_us} us");
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
    let before = scene.python.value("BEFORE");
    let mut number = 0;
    // A busy machine makes waits longer: not each time so many of them.
    let is_uniform = (0..TRIES).any(|_| {
        // All at once, so that the program waits for nobody else between them.
        let told = scene.python.value("[attempt() for _ in range(40)]");
        let mut waits = Vec::new();
        for attempt in told.as_array().expect("a list") {
            assert_eq!(attempt[0], ECONNREFUSED);
            assert_eq!(attempt[2], before, "options after attempt {number}");
            waits.push(attempt[1].as_u64().expect("a number") / 1000);
            number += 1;
        }
        eprintln!("{waits:?}");
        let late = waits.iter().filter(|&&wait| wait > 200).count();
        // Uniform up to 160 ms: of 37, none of the quarters has fewer than two.
        let mut quarters = (0..4).map(|quarter| {
            let within = quarter * 40..quarter * 40 + 45;
            let waits = waits[3..].iter();
            waits.filter(|&&wait| within.contains(&wait)).count()
        });
        late <= 4 && quarters.all(|count| count >= 2)
    });
    assert!(is_uniform, "never as expected in {TRIES} tries");
    let row = scene.row();
    assert_eq!(row["attempts"], number, "{row:#}");
    assert_eq!(row["failures"]["refused"], number, "{row:#}");
    // Some are held for no tick, and some come so late that they are not taken for retries.
    let held = row["held"]["backoff"].as_u64().expect("a number");
    assert!((number / 2..number).contains(&held), "{row:#}");
}

#[test]
fn the_latency_counts_from_when_the_syn_left() {
    let config = backoff("4s", "4s").replace("connect = \"1s\"", "connect = \"30s\"");
    let scene = Scene::new(&config);
    let (took, row) = wait::until("a retry that is held for long", 5 * SOON, || {
        let mut python = program(&scene.group, &scene.net);
        assert_eq!(attempt(&mut python).0, ECONNREFUSED);
        let server = Server::start(&scene.net.server, TO);
        let (errno, took, has_its_options) = attempt(&mut python);
        assert_eq!(errno, 0);
        assert!(has_its_options);
        let row = scene.row();
        server.stop();
        (took > 1_000_000).then_some((took, row))
    });
    let max = row["connect_latency_us"]["max"].as_u64();
    assert!(max < Some(took / 2), "{took} us, {row:#}");
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
        // On a busy machine later, but never as late as without us: two minutes.
        assert!((950_000..30_000_000).contains(&took), "{took} us");
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
    } = Scene::new(&backoff("1h", "1h"));
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
    // Whoever closes has not given up, however slow the test is.
    let mut scene = Scene::new(
        "[defaults.breaker]\nfailure_rate = \"off\"\nconsecutive_failures = 0\ngave_up = \"1h\"\n\
         [defaults.retry]\nlimit = \"off\"\nbudget = \"off\"\nmax_held = 3\n\
         backoff = { base = \"1h\", max = \"1h\" }\n",
    );
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
    let row = wait::until("all gone", SOON, || {
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
    let config = "[defaults]\nbreaker = \"off\"\n[defaults.timeouts]\nconnect = \"4s\"\ndeadline = \"7s\"\n\
                  [defaults.retry]\nlimit = \"off\"\nbudget = \"off\"\n";
    let Scene {
        net,
        agent,
        mut python,
        group: _group,
    } = Scene::new(config);
    let _syns = net.server.count_syns(8080, true);
    // Each time another task. A busy machine may make one wait between two attempts, and then the later one
    // is not taken for a retry.
    python.run(
        "def operation():\n r = []\n t = __import__('threading').Thread(target=lambda: \
         r.extend(attempt() for _ in range(4)))\n t.start()\n t.join()\n return r",
    );
    let mut attempts = 0;
    let is_bounded = (0..TRIES).any(|_| {
        let told = python.value("operation()");
        eprintln!("{told}");
        let all = told.as_array().expect("a list");
        assert!(all.iter().all(|attempt| attempt[0] == ETIMEDOUT), "{told}");
        let took = |attempt: usize| all[attempt][1].as_u64().expect("a time");
        assert!(took(0) >= 4_000_000, "{told}");
        let row = quiet(&agent);
        let before = attempts;
        attempts = row["attempts"].as_u64().expect("a count");
        // What is left of it; then it is used up, or all but a few milliseconds of it are.
        took(0) < 6_500_000
            && (400_000..4_000_000).contains(&took(1))
            && took(2) < 2_000_000
            && attempts - before <= 3
    });
    assert!(is_bounded, "never as expected in {TRIES} tries");
    let row = quiet(&agent);
    assert!(row["rejected"]["deadline"].as_u64() >= Some(1), "{row:#}");
    wait::until("an event that says so", SOON, || {
        let events = agent.command(&["events", "--json"]).good();
        events.contains("\"reason\":\"deadline\"").then_some(())
    });
}

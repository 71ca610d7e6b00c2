//! `run --takeover`: an upgrade without a gap; and how long the gap of a plain restart is.

use std::{
    net::SocketAddr,
    time::{Duration, Instant},
};

use rustix::process::Signal;
use serde_json::Value;
use tests::{
    agent::{Agent, AgentOptions, binary},
    attached,
    cgroup::TestCgroup,
    dialer::Dialer,
    interpreter::Interpreter,
    need,
    net::TestNet,
    process::Program,
    server::Server,
    talk::echo,
    wait,
};

const DIAL: &str = env!("CARGO_BIN_EXE_dial");
/// Its breaker is open.
const SICK: SocketAddr = TestNet::server4(8080);
/// Its breaker is closed.
const WELL: SocketAddr = TestNet::server4(8081);
const SOON: Duration = wait::LONGEST;

/// Refusals are told by their errno, never held, and the breaker stays open for the whole of a test.
const CONFIG: &str = "[defaults]\nretry = \"off\"\n[defaults.breaker]\nerrno = \"EPERM\"\nredial = false\ncooldown = \"5m\"\n";

struct Scene {
    net: TestNet,
    group: TestCgroup,
    agent: Agent,
    _servers: Vec<Server>,
}

impl Scene {
    /// A destination that failed and is back, its breaker open, and one that is well.
    fn new(label: &str) -> Self {
        let (net, group) = (TestNet::new(), TestCgroup::new(label));
        let agent = AgentOptions::new(&group).config(CONFIG).start();
        let mut dialer = Dialer::start(DIAL, &group, &net.client);
        for _ in 0..5 {
            assert_eq!(dialer.connect(SICK).errno, libc::ECONNREFUSED);
        }
        agent.wait_state(&SICK.to_string(), "open");
        let servers = [SICK, WELL].map(|to| Server::hanging_up(&net.server, to));
        Self {
            net,
            group,
            agent,
            _servers: servers.into(),
        }
    }

    fn dialer(&self) -> Dialer {
        Dialer::start(DIAL, &self.group, &self.net.client)
    }

    fn successor(&self) -> AgentOptions {
        self.agent.options().clone().args(&["--takeover"])
    }
}

fn times(steady: &Value, errno: i32) -> u64 {
    steady["errnos"][errno.to_string()].as_u64().unwrap_or(0)
}

/// All connects ended like this.
#[track_caller]
fn only(steady: &Value, errno: i32) {
    let errnos = steady["errnos"].as_object().expect("an object");
    assert!(
        errnos.len() == 1 && times(steady, errno) > 100,
        "{steady:#}"
    );
}

#[test]
fn not_one_connect_slips_through_and_not_one_fails() {
    let scene = Scene::new("takeover");
    scene
        .agent
        .command(&["hold-closed", "10.77.0.9:1", "--for", "5m"])
        .good();
    let before = scene.agent.row(&SICK.to_string());
    let (mut sick, mut well) = (scene.dialer(), scene.dialer());
    let pid = scene.agent.pid();
    sick.begin_steady(SICK);
    well.begin_steady(WELL);
    std::thread::sleep(Duration::from_millis(300));
    let began = Instant::now();
    let second = scene.successor().start();
    let took = began.elapsed();
    // The first one has ended by itself before the second was ready.
    let Scene {
        agent, net, group, ..
    } = &scene;
    wait::until("the end of the first agent", SOON, || {
        (!std::path::Path::new(&format!("/proc/{pid}/exe")).exists()).then_some(())
    });
    // And a third one takes over from the second.
    let third = second.options().clone().start();
    third.wait_row(&WELL.to_string(), "its calls", |row| {
        row["established"].as_u64() > Some(100)
    });
    let (sick, well) = (sick.enough(), well.enough());
    eprintln!("a takeover took {took:?}: {sick} {well}");
    only(&sick, libc::EPERM);
    only(&well, 0);

    let row = third.row(&SICK.to_string());
    assert_eq!(row["state"], "open", "{row:#}");
    assert_eq!(row["reason"], before["reason"]);
    let age = |row: &Value| row["state_age_ms"].as_u64().expect("an age");
    assert!(age(&row) > age(&before), "{row:#}");
    let row = third.row(&WELL.to_string());
    assert_eq!(row["state"], "closed", "{row:#}");
    assert_eq!(row["windows"]["connects"]["failures"], 0, "{row:#}");
    agent.wait_log("another agent has taken over");
    third.wait_log("taking over from the agent");
    // Only one is attached, and it knows the manual state.
    wait::until("only one attached", SOON, || {
        (attached::programs(group) == [1; 4]).then_some(())
    });
    let explained = third.command(&["explain", "10.77.0.9:1"]).good();
    assert!(explained.contains("held closed"), "{explained}");
    assert_eq!(third.stop().code(), 0);
    assert_eq!(attached::programs(group), [0; 4]);
    drop((net, second));
}

/// Failures of the overlap count once: two failed connects before, two in the middle and none after do
/// not make five in a row.
#[test]
fn calls_of_the_overlap_count_once() {
    let (net, group) = (TestNet::new(), TestCgroup::new("takeover-once"));
    let agent = AgentOptions::new(&group).config(CONFIG).start();
    let mut dialer = Dialer::start(DIAL, &group, &net.client);
    let destination = SICK.to_string();
    for _ in 0..2 {
        assert_eq!(dialer.connect(SICK).errno, libc::ECONNREFUSED);
    }
    let options = agent.options().clone().args(&["--takeover"]);
    // (The agent is the child of this thread, and ends with it.)
    let second = std::thread::scope(|scope| {
        scope.spawn(|| {
            for _ in 0..2 {
                wait::until("the takeover", SOON, || {
                    let log = agent.log();
                    log.contains("begins to take over").then_some(())
                });
                assert_eq!(dialer.connect(SICK).errno, libc::ECONNREFUSED);
            }
        });
        options.start()
    });
    let row = second.row(&destination);
    let failed = row["windows"]["connects"]["failures"].as_u64();
    assert!(
        failed.is_some_and(|failed| (2..=4).contains(&failed)),
        "{row:#}"
    );
    assert_eq!(row["state"], "closed", "{row:#}");
}

/// Live connections are followed by the new agent, and a limit knows of them.
#[test]
fn connections_are_adopted() {
    need!("python3");
    let (net, group) = (TestNet::new(), TestCgroup::new("takeover-live"));
    let config = "[defaults.limits]\nconnections = 2\n";
    let agent = AgentOptions::new(&group).config(config).start();
    let _server = Server::with(&net.server, WELL, echo);
    let mut python = Interpreter::start(&group, &net.client);
    let connect = "socket.create_connection(('10.77.0.2', 8081))";
    python.value(&format!("(a := {connect}) and 0"));
    python.value(&format!("(b := {connect}) and 0"));
    let ask = |python: &mut Interpreter, name: &str| {
        python.value(&format!("{name}.sendall(b'x')"));
        assert_eq!(python.value(&format!("len({name}.recv(1))")), 1);
    };
    // (Of a connection without an answer yet, the next one may be to a request of before.)
    for name in ["a", "b"] {
        ask(&mut python, name);
    }
    std::thread::sleep(Duration::from_millis(50));
    for name in ["a", "b"] {
        ask(&mut python, name);
    }
    let second = agent.options().clone().args(&["--takeover"]).start();
    assert_eq!(python.errno(connect), libc::ECONNREFUSED);
    for name in ["a", "b"] {
        ask(&mut python, name);
        ask(&mut python, name);
    }
    // (The first answer may be taken for one to a request of before.)
    let row = second.wait_row(&WELL.to_string(), "answers", |row| {
        row["responses"].as_u64() >= Some(2)
    });
    assert_eq!(row["limits"]["connections"]["used"], 2, "{row:#}");
    python.value("a.close()");
    second.wait_row(&WELL.to_string(), "one left", |row| {
        row["limits"]["connections"]["used"] == 1
    });
    python.value(&format!("(c := {connect}) and 0"));
}

/// A pause goes over, also into another state directory.
#[test]
fn a_pause_goes_over() {
    let scene = Scene::new("takeover-pause");
    scene.agent.command(&["pause", "--for", "10m"]).good();
    let home = scene.agent.home();
    let program = Program::new(binary())
        .args(["run", "--takeover", "--listen", "none"])
        .arg("--socket")
        .arg(home.socket())
        .arg("--state-dir")
        .arg(home.path().join("other"))
        .arg("--config")
        .arg(home.config())
        .arg("--cgroup")
        .arg(scene.group.path())
        .within(SOON);
    let second = scene.successor().start_as(program);
    assert!(second.status()["paused"]["since"].is_string());
    let mut dialer = scene.dialer();
    assert_eq!(dialer.connect(SICK).errno, 0);
    second.command(&["resume"]).good();
    assert_eq!(dialer.connect(SICK).errno, libc::EPERM);
}

/// A new agent that is killed on its way, also when it refuses already, leaves the old one in charge.
#[test]
fn a_new_agent_that_is_killed_leaves_the_old_one_in_charge() {
    let scene = Scene::new("takeover-killed");
    let mut sick = scene.dialer();
    let both = || attached::programs(&scene.group) == [2; 4];
    let mut killed = 0;
    for round in 0..6 {
        let mut second = scene.successor().program().spawn();
        sick.begin_steady(SICK);
        wait::until("the moment of its end", SOON, || {
            match round % 3 {
                0 => second.stderr_so_far().contains("taking over"),
                1 => both(),
                _ => second.stderr_so_far().contains("followed from here on"),
            }
            .then(|| second.signal(Signal::KILL))
        });
        second.extend_deadline(SOON);
        let _ = second.wait();
        let answer = sick.enough();
        if scene.agent.log().contains("another agent has taken over") {
            // The last moment was too late: this once, there was nobody left.
            break;
        }
        killed += 1;
        assert_eq!(times(&answer, 0), 0, "{answer:#}");
        // Nothing of the second one is left, and the first is as before.
        let row = scene.agent.row(&SICK.to_string());
        assert_eq!(row["state"], "open", "{row:#}");
        wait::until("only one attached", SOON, || {
            (attached::programs(&scene.group) == [1; 4]).then_some(())
        });
        scene.agent.command(&["trip", "10.77.0.9:1"]).good();
    }
    assert!(killed >= 2, "{killed}");
}

/// While a new agent takes over, the old one is not changed any more.
#[test]
fn nothing_is_changed_in_the_middle() {
    let scene = Scene::new("takeover-middle");
    let mut second = scene.successor().program().spawn();
    // Stopped somewhere on its way.
    wait::until("the takeover to begin", SOON, || {
        let began = scene.agent.log().contains("begins to take over");
        began.then(|| second.signal(Signal::STOP))
    });
    if scene.agent.log().contains("another agent has taken over") {
        return;
    }
    for args in [&["trip", "10.77.0.9:1"][..], &["pause"], &["resume"]] {
        let refused = scene.agent.command(args);
        if refused.code() != 1 || !refused.stderr.contains("is taking over") {
            // Its last words may be on their way: then the second one was quicker than the signal.
            let what = format!("the end of the first agent, or a refusal instead of {refused}");
            wait::until(&what, Duration::from_secs(10), || {
                let log = scene.agent.log();
                log.contains("another agent has taken over").then_some(())
            });
            return;
        }
    }
    second.signal(Signal::KILL);
    second.extend_deadline(SOON);
    let _ = second.wait();
    wait::until("the first agent to be in charge again", SOON, || {
        let done = scene.agent.command(&["trip", "10.77.0.9:1"]);
        done.status.success().then_some(())
    });
}

#[test]
fn who_cannot_be_taken_over_from() {
    let scene = Scene::new("takeover-deaf");
    // Without the flag, as ever.
    let refused = scene.agent.options().program().run();
    assert_eq!(refused.code(), 1, "{refused}");
    assert!(refused.stderr.contains("--takeover"), "{refused}");
    // One that says nothing.
    scene.agent.signal(Signal::STOP);
    let deaf = scene.successor().program().run();
    scene.agent.signal(Signal::CONT);
    assert_eq!(deaf.code(), 1, "{deaf}");
    assert!(
        deaf.stderr.contains("take over from the agent on")
            && deaf.stderr.contains("does not answer")
            && deaf.stderr.contains("nothing has changed")
            && deaf
                .stderr
                .contains(&format!("kill -CONT {}", scene.agent.pid())),
        "{deaf}"
    );
    let row = scene.agent.wait_state(&SICK.to_string(), "open");
    assert_eq!(row["state"], "open");
    // Nobody there: an ordinary start.
    let options = scene.successor();
    let Scene { agent, .. } = &scene;
    agent.signal(Signal::TERM);
    let pid = agent.pid();
    wait::until("its end", SOON, || {
        (!std::path::Path::new(&format!("/proc/{pid}/exe")).exists()).then_some(())
    });
    let second = options.start();
    assert_eq!(second.row(&SICK.to_string())["state"], "open");
}

/// What the documentation says of a plain restart: for about so long every connect passes.
#[test]
fn the_gap_of_a_plain_restart() {
    let scene = Scene::new("restart-gap");
    let mut sick = scene.dialer();
    sick.begin_steady(SICK);
    std::thread::sleep(Duration::from_millis(200));
    let options = scene.agent.options().clone();
    let Scene {
        agent,
        group: _group,
        net: _net,
        _servers,
    } = scene;
    let began = Instant::now();
    agent.stop();
    let stopped = began.elapsed();
    let second = options.start();
    let took = began.elapsed();
    let steady = sick.enough();
    let span = steady["last_us"].as_u64().expect("some pass")
        - steady["first_us"].as_u64().expect("some pass");
    eprintln!(
        "a plain restart: stop {stopped:?}, ready again after {took:?}; {} connects passed an open \
         breaker within {} ms",
        times(&steady, 0),
        span / 1000
    );
    assert!(times(&steady, libc::EPERM) > 0, "{steady:#}");
    // (The program may be held up between its connect and its clock.)
    assert!(
        u128::from(span) <= took.as_micros() + 1_000_000,
        "{steady:#}"
    );
    assert_eq!(second.row(&SICK.to_string())["state"], "open");
}

/// The old agent is killed while the new one takes over: the new one goes on, with what it has got already
/// or with what is on the disk.
#[test]
fn an_old_agent_that_is_killed_does_not_take_the_new_one_with_it() {
    for late in [false, true] {
        let scene = Scene::new(if late {
            "takeover-late"
        } else {
            "takeover-early"
        });
        let file = scene.agent.home().path().join("state/state.json");
        wait::until("the open breaker on the disk", SOON, || {
            let text = std::fs::read_to_string(&file).ok()?;
            text.contains("\"state\":\"open\"").then_some(())
        });
        let old = &scene.agent;
        let second = std::thread::scope(|scope| {
            scope.spawn(|| {
                wait::until("the takeover", SOON, || {
                    let both = || attached::programs(&scene.group) == [2; 4];
                    let began = || old.log().contains("begins to take over");
                    // It may be over before it is looked.
                    let over = || old.log().contains("another agent has taken over");
                    (if late { both() || over() } else { began() }).then_some(())
                });
                old.signal(Signal::KILL);
            });
            scene.successor().start()
        });
        assert_eq!(second.row(&SICK.to_string())["state"], "open");
        assert_eq!(scene.dialer().connect(SICK).errno, libc::EPERM);
        assert_eq!(scene.dialer().connect(WELL).errno, 0);
        wait::until("only one attached", SOON, || {
            (attached::programs(&scene.group) == [1; 4]).then_some(())
        });
        second.command(&["trip", "10.77.0.9:1"]).good();
        assert_eq!(second.stop().code(), 0);
    }
}

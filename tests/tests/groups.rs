//! Of the endpoints of one name, breakers never cut off the last path (rule 16).

use std::net::SocketAddr;

use tests::{
    agent::{Agent, AgentOptions},
    cgroup::TestCgroup,
    dialer::Dialer,
    names::EtcFiles,
    net::TestNet,
    server::Server,
};

const DIAL: &str = env!("CARGO_BIN_EXE_dial");
/// Nothing that a test waits for comes by the cooldown, and no call is too old.
const CONFIG: &str = "[defaults.breaker]\ncooldown = \"5m\"\nwindow_age = \"30m\"\n\
     [[policy]]\nname = \"web\"\ndestinations = [\"web.internal\"]\n";

fn start(group: &TestCgroup, config: &str, hosts: &str) -> Agent {
    let etc = EtcFiles::new(hosts, None);
    let options = AgentOptions::new(group).config_for_loops(config);
    options.start_as(etc.program(options.program()))
}

/// Four addresses of the server, refused on all ports.
struct Scene {
    net: TestNet,
    group: TestCgroup,
}

impl Scene {
    fn new(label: &str) -> Self {
        let scene = Self {
            net: TestNet::new(),
            group: TestCgroup::new(label),
        };
        for last in 3..6 {
            scene
                .net
                .server
                .ip(&format!("addr add 10.77.0.{last}/24 dev s0\n"));
        }
        scene
    }

    fn dialer(&self) -> Dialer {
        Dialer::start(DIAL, &self.group, &self.net.client)
    }
}

fn endpoint(i: u8) -> SocketAddr {
    SocketAddr::new([10, 77, 0, 2 + i].into(), 8080)
}

fn name(i: u8) -> String {
    endpoint(i).to_string()
}

fn hosts(count: u8) -> String {
    (0..count)
        .map(|i| format!("{} web.internal\n", endpoint(i).ip()))
        .collect()
}

fn fail(dialer: &mut Dialer, i: u8, times: u32) {
    for _ in 0..times {
        assert_eq!(dialer.connect(endpoint(i)).errno, libc::ECONNREFUSED);
    }
}

/// So many failures have opened nothing.
fn bypassed(agent: &Agent, i: u8, count: u64) -> serde_json::Value {
    let row = agent.wait_row(&name(i), "its failures", |row| {
        row["failures"]["refused"] == count && row["bypassed_for_safety"] == true
    });
    assert_eq!(row["state"], "closed", "{row:#}");
    assert_eq!(row["bypassed_reason"], "max_open_share", "{row:#}");
    row
}

#[test]
fn the_last_path_stays_and_is_shown() {
    let scene = Scene::new("last-path");
    let agent = start(&scene.group, CONFIG, &hosts(2));
    let mut dialer = scene.dialer();
    let mut events = agent.follow(&[]);
    // The first connect makes the row, which is in the group a moment later.
    for i in 0..2 {
        fail(&mut dialer, i, 1);
        agent.wait_row(&name(i), "its name", |row| row["name"] == "web.internal");
    }
    fail(&mut dialer, 0, 4);
    agent.wait_state(&name(0), "open");
    fail(&mut dialer, 1, 9);
    let row = bypassed(&agent, 1, 10);
    assert_eq!(row["rejected"]["breaker"], 0, "{row:#}");
    let said = events.wait("the safety event", |event| event["kind"] == "safety");
    assert_eq!(said["action"], "bypassed", "{said:#}");
    assert_eq!(said["destination"], name(1), "{said:#}");
    let message = said["message"].as_str().expect("a sentence");
    assert!(
        message.contains("of 2 endpoints of web.internal, 1 refuses"),
        "{message}"
    );
    let text = agent.command(&["status"]).good();
    assert!(text.contains("bypassed"), "{text}");
    for command in ["explain", "status"] {
        let text = agent.command(&[command, &name(1)]).good();
        let why = "as many endpoints of web.internal as may refuse already refuse, or";
        assert!(text.contains("bypassed") && text.contains(why), "{text}");
    }

    // The first one comes back. Once it lets everything pass, the other one has room, and opens with its
    // next failure.
    let server = Server::start(&scene.net.server, endpoint(0));
    agent.wait_state(&name(0), "half_open");
    for _ in 0..2 {
        tests::wait::until(
            "a probe to pass",
            std::time::Duration::from_secs(60),
            || (dialer.connect(endpoint(0)).errno == 0).then_some(()),
        );
    }
    agent.wait_state(&name(0), "closed");
    fail(&mut dialer, 1, 1);
    let row = agent.wait_row(&name(1), "its failures", |row| {
        row["failures"]["refused"] == 11
    });
    let still = !agent.row(&name(0))["ramp_ends_in_ms"].is_null();
    assert!(!still || row["state"] == "closed", "both refuse: {row:#}");
    agent.wait_row(&name(0), "the end of its ramp", |row| {
        row["ramp_ends_in_ms"].is_null()
    });
    fail(&mut dialer, 1, 1);
    let row = agent.wait_state(&name(1), "open");
    assert_eq!(row["bypassed_for_safety"], false, "{row:#}");
    server.stop();
}

#[test]
fn half_of_four_may_open() {
    let scene = Scene::new("half");
    let config = format!("{CONFIG}breaker = {{ redial = false }}\n");
    let agent = start(&scene.group, &config, &hosts(4));
    let mut dialer = scene.dialer();
    for i in 0..4 {
        fail(&mut dialer, i, 1);
        agent.wait_row(&name(i), "its name", |row| row["name"] == "web.internal");
    }
    for i in 0..2 {
        fail(&mut dialer, i, 4);
        agent.wait_state(&name(i), "open");
    }
    for i in 2..4 {
        fail(&mut dialer, i, 6);
        bypassed(&agent, i, 7);
    }
}

#[test]
fn a_name_with_one_address_opens_like_any_other() {
    let scene = Scene::new("alone");
    let agent = start(&scene.group, CONFIG, &hosts(1));
    let mut dialer = scene.dialer();
    fail(&mut dialer, 0, 5);
    agent.wait_state(&name(0), "open");
    // Neither another port nor an address without a name is of its group.
    let other = TestNet::server4(8081);
    for _ in 0..5 {
        assert_eq!(dialer.connect(other).errno, libc::ECONNREFUSED);
    }
    agent.wait_state(&other.to_string(), "open");
    fail(&mut dialer, 1, 5);
    agent.wait_state(&name(1), "open");
}

#[test]
fn without_a_share_all_open() {
    let scene = Scene::new("no-share");
    let config = format!("{CONFIG}breaker = {{ redial = false, max_open_share = \"off\" }}\n");
    let agent = start(&scene.group, &config, &hosts(2));
    let mut dialer = scene.dialer();
    for i in 0..2 {
        fail(&mut dialer, i, 5);
        agent.wait_state(&name(i), "open");
    }
    // A reload that sets one closes what is open beyond it: who opened last.
    agent
        .home()
        .write_config(&format!("{CONFIG}breaker = {{ redial = false }}\n"));
    agent.wait_state(&name(1), "closed");
    assert_eq!(agent.row(&name(0))["state"], "open");
}

/// Who calls only two of four addresses has two more: they are known from the name.
#[test]
fn addresses_that_nobody_has_called_are_paths_too() {
    let scene = Scene::new("paths");
    let config = format!("{CONFIG}breaker = {{ redial = false }}\n");
    let agent = start(&scene.group, &config, &hosts(4));
    let mut dialer = scene.dialer();
    for i in 0..2 {
        fail(&mut dialer, i, 1);
        agent.wait_row(&name(i), "its name", |row| row["name"] == "web.internal");
        fail(&mut dialer, i, 4);
    }
    for i in 0..2 {
        agent.wait_state(&name(i), "open");
    }
}

/// An operator drains two healthy endpoints. The dead one stays closed to traffic: it is not the last path
/// that the orders would take away, but the only one that leads nowhere.
#[test]
fn orders_for_others_close_no_open_breaker() {
    let scene = Scene::new("drained");
    let config = format!("{CONFIG}breaker = {{ redial = false }}\n");
    let agent = start(&scene.group, &config, &hosts(4));
    let mut dialer = scene.dialer();
    for i in 0..4 {
        fail(&mut dialer, i, 1);
        agent.wait_row(&name(i), "its name", |row| row["name"] == "web.internal");
    }
    fail(&mut dialer, 0, 4);
    agent.wait_state(&name(0), "open");
    for i in 1..3 {
        agent.command(&["trip", &name(i)]).good();
        agent.wait_state(&name(i), "forced_open");
        assert_eq!(agent.row(&name(0))["state"], "open", "{i}");
    }
    // They count where others would open: the fourth one stays.
    fail(&mut dialer, 3, 6);
    bypassed(&agent, 3, 7);
}

/// Two of four are open, two bypassed: so they are after a restart, and after a takeover.
#[test]
fn a_restart_leaves_a_group_as_it_was() {
    let scene = Scene::new("restart");
    let config = format!("{CONFIG}breaker = {{ redial = false, errno = \"EPERM\" }}\n");
    let etc = EtcFiles::new(&hosts(4), None);
    let options = AgentOptions::new(&scene.group).config_for_loops(&config);
    let agent = options.start_as(etc.program(options.program()));
    let mut dialer = scene.dialer();
    for i in 0..4 {
        fail(&mut dialer, i, 1);
        agent.wait_row(&name(i), "its name", |row| row["name"] == "web.internal");
    }
    for i in 0..4 {
        fail(&mut dialer, i, 4);
        if i < 2 {
            agent.wait_state(&name(i), "open");
        } else {
            bypassed(&agent, i, 5);
        }
    }
    let check = |agent: &Agent, dialer: &mut Dialer| {
        for i in 0..2 {
            let row = agent.row(&name(i));
            assert_eq!(row["state"], "open", "{row:#}");
            assert_eq!(dialer.connect(endpoint(i)).errno, libc::EPERM);
        }
        for i in 2..4 {
            let row = agent.row(&name(i));
            assert_eq!(row["state"], "closed", "{row:#}");
            assert_eq!(row["bypassed_reason"], "max_open_share", "{row:#}");
            assert_eq!(row["windows"]["connects"]["failures"], 5, "{row:#}");
        }
        let text = agent.command(&["events"]).good();
        assert!(!text.contains("open -> closed"), "{text}");
    };
    check(&agent, &mut dialer);
    assert_eq!(agent.stop().code(), 0);
    let agent = options.start_as(etc.program(options.program()));
    check(&agent, &mut dialer);
    let successor = options.clone().args(&["--takeover"]);
    let second = successor.start_as(etc.program(successor.program()));
    check(&second, &mut dialer);
}

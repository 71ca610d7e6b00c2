//! What programs are told about names, by a DNS server of the test's own: real programs resolve through
//! it, and the agent hears.

use std::{
    net::{IpAddr, SocketAddr, UdpSocket},
    time::Duration,
};

use serde_json::Value;
use tests::{
    agent::Agent,
    cgroup::TestCgroup,
    dialer::Dialer,
    interpreter::{Interpreter, LOOP},
    names::{DnsServer, EtcFiles, Says, wire},
    need,
    net::{Namespace, TestNet},
    process::{Program, python},
    server::Server,
    wait,
};

const DIAL: &str = env!("CARGO_BIN_EXE_dial");
const TO: SocketAddr = TestNet::server4(8080);
const DESTINATION: &str = "10.77.0.2:8080";
const SOON: Duration = Duration::from_secs(60);

struct Scene {
    net: TestNet,
    group: TestCgroup,
    dns: DnsServer,
    etc: EtcFiles,
}

impl Scene {
    fn new(label: &str) -> Self {
        Self::with_server(label, TestNet::SERVER4)
    }

    fn with_server(label: &str, server: IpAddr) -> Self {
        let net = TestNet::new();
        Self {
            group: TestCgroup::new(label),
            dns: DnsServer::start(&net.server, server),
            etc: EtcFiles::new("", Some(server)),
            net,
        }
    }

    /// A program of the workload's, which resolves through the server.
    fn program(&self, program: Program) -> Program {
        let program = self.etc.program(program);
        program.in_cgroup(&self.group).in_netns(&self.net.client)
    }

    fn python(&self) -> Interpreter {
        Interpreter::start_by(self.program(Program::new(python()).args(["-c", LOOP])))
    }
}

fn connect(python: &mut Interpreter, name: &str) {
    python.value(&format!(
        "socket.create_connection(({name:?}, 8080), 60).close()"
    ));
}

fn named(agent: &Agent, destination: &str, name: &str) -> Value {
    agent.wait_row(destination, name, |row| row["name"] == name)
}

#[test]
fn programs_teach_the_agent_names() {
    need!("python3", "curl", "getent");
    for server in [TestNet::SERVER4, TestNet::SERVER6] {
        let scene = Scene::with_server("heard", server);
        let _server = Server::start(&scene.net.server, TO);
        let six = SocketAddr::new(TestNet::SERVER6, 8080);
        let _six = Server::start(&scene.net.server, six);
        let config = r#"
            [[policy]]
            name = "internal"
            destinations = ["*.internal:8080"]
            timeouts = { connect = "900ms" }
        "#;
        let agent = Agent::start_for_loops(&scene.group, config);
        scene.dns.addresses("db.internal", &[TO.ip()]);
        let alias = Says {
            alias: Some("Six.Internal".to_owned()),
            addresses: vec![six.ip()],
            ttl: 5,
        };
        scene.dns.says("www.example.org", alias);
        let mut python = scene.python();
        connect(&mut python, "DB.internal");
        let row = named(&agent, DESTINATION, "db.internal");
        agent.wait_row(DESTINATION, "its policy", |row| row["policy"] == "internal");
        assert_eq!(row["netns"], scene.net.client.inode(), "{row:#}");
        assert!(scene.dns.asked() > 0);

        // The alias is a name too, and the name that was asked for comes first.
        let url = "http://www.example.org:8080/";
        let curl = Program::new("curl").args(["-s", "-o", "/dev/null", "-m", "60", url]);
        scene.program(curl).run();
        let row = named(&agent, &six.to_string(), "www.example.org");
        agent.wait_row(&six.to_string(), "its policy", |row| {
            row["policy"] == "internal"
        });
        assert_eq!(row["netns"], scene.net.client.inode(), "{row:#}");
        let explained = agent.command(&["explain", "six.internal:8080"]).good();
        assert!(
            explained.contains("www.example.org, six.internal"),
            "{explained}"
        );

        // A name without a connect of its own, to an address that has a row.
        scene.dns.addresses("second.internal", &[TO.ip()]);
        let getent = Program::new("getent").args(["ahosts", "second.internal"]);
        scene.program(getent).run();
        wait::until("the second name", SOON, || {
            let rows = agent.command(&["status", "second.internal:8080", "--json"]);
            rows.stdout.contains(DESTINATION).then_some(())
        });
        assert_eq!(agent.row(DESTINATION)["name"], "db.internal");
    }
}

/// What was said in one namespace is of no concern in another.
#[test]
fn a_name_belongs_to_the_namespace_in_which_it_was_heard() {
    need!("python3");
    let scene = Scene::new("apart");
    let other = Namespace::new("other");
    other.ip("addr add 10.77.0.2/32 dev lo\n");
    let _server = Server::start(&scene.net.server, TO);
    let agent = Agent::start_for_loops(&scene.group, "");
    scene.dns.addresses("db.internal", &[TO.ip()]);
    connect(&mut scene.python(), "db.internal");
    named(&agent, DESTINATION, "db.internal");
    let mut dialer = Dialer::start(DIAL, &scene.group, &other);
    assert_eq!(dialer.connect(TO).errno, libc::ECONNREFUSED);
    let rows = wait::until("both rows", SOON, || {
        Some(agent.rows(DESTINATION)).filter(|rows| rows.len() == 2)
    });
    for row in rows {
        let here = row["netns"] == scene.net.client.inode();
        let name = if here {
            "db.internal".into()
        } else {
            Value::Null
        };
        assert_eq!(row["name"], name, "{row:#}");
    }
}

/// Endpoints that programs have been told of are a group, and the last path of it stays.
#[test]
fn a_heard_name_makes_a_group() {
    need!("python3");
    let scene = Scene::new("heard-group");
    scene.net.server.ip("addr add 10.77.0.3/24 dev s0\n");
    let other: SocketAddr = "10.77.0.3:8080".parse().expect("an address");
    let agent = Agent::start_for_loops(&scene.group, "[defaults.breaker]\nredial = false\n");
    scene.dns.addresses("web.internal", &[TO.ip(), other.ip()]);
    let mut python = scene.python();
    let mut fail = || {
        let refused = python.errno("socket.create_connection((\"web.internal\", 8080), 60)");
        assert_eq!(refused, libc::ECONNREFUSED);
    };
    fail();
    for to in [TO, other] {
        named(&agent, &to.to_string(), "web.internal");
    }
    for _ in 0..9 {
        fail();
    }
    // The program tries both each time; one of them opens, and the other one may not.
    let all = [TO, other].map(|to| {
        agent.wait_row(&to.to_string(), "its calls", |row| {
            row["state"] == "open"
                || row["failures"]["refused"] == 10 && row["bypassed_for_safety"] == true
        })
    });
    let open = all.iter().filter(|row| row["state"] == "open").count();
    let bypassed = all
        .iter()
        .filter(|row| row["bypassed_for_safety"] == true)
        .count();
    assert_eq!((open, bypassed), (1, 1), "{all:#?}");
}

/// Two of four addresses may be open. An answer that gives half of the addresses is no reason to close one,
/// just because the agent that heard the whole is another one.
#[test]
fn a_restart_forgets_no_name() {
    need!("python3");
    let scene = Scene::new("heard-restart");
    let all: Vec<SocketAddr> = (2..6)
        .map(|last| SocketAddr::new([10, 77, 0, last].into(), 8080))
        .collect();
    for to in &all[1..] {
        scene
            .net
            .server
            .ip(&format!("addr add {}/24 dev s0\n", to.ip()));
    }
    let addresses: Vec<IpAddr> = all.iter().map(SocketAddr::ip).collect();
    let config = "[defaults.breaker]\nredial = false\ncooldown = \"10m\"\ncooldown_max = \"10m\"\n\
                  [[policy]]\nname = \"web\"\ndestinations = [\"*.internal\"]\n";
    let agent = Agent::start_for_loops(&scene.group, config);
    let mut python = scene.python();
    let told = |python: &mut Interpreter, name: &str| {
        python.value(&format!("len(socket.getaddrinfo({name:?}, 8080))"));
    };
    scene.dns.addresses("web.internal", &addresses);
    told(&mut python, "web.internal");
    let mut dialer = Dialer::start(DIAL, &scene.group, &scene.net.client);
    for to in &all[..2] {
        let name = to.to_string();
        assert_eq!(dialer.connect(*to).errno, libc::ECONNREFUSED);
        named(&agent, &name, "web.internal");
        for _ in 0..4 {
            assert_eq!(dialer.connect(*to).errno, libc::ECONNREFUSED);
        }
        agent.wait_state(&name, "open");
    }
    let options = agent.options().clone();
    assert_eq!(agent.stop().code(), 0);
    let agent = options.start();
    // Known from the start, and of an address that nobody has called, too.
    for to in &all[..2] {
        let row = agent.row(&to.to_string());
        let known = (&row["state"], &row["name"], &row["policy"]);
        assert_eq!(
            known,
            (&"open".into(), &"web.internal".into(), &"web".into())
        );
    }
    let explained = agent.command(&["explain", &all[3].to_string()]).good();
    assert!(explained.contains("web.internal"), "{explained}");
    scene.dns.addresses("web.internal", &addresses[..2]);
    told(&mut python, "web.internal");
    // Heard after it: so that has been heard as well.
    scene.dns.addresses("after.internal", &addresses[..1]);
    told(&mut python, "after.internal");
    agent.wait_row(&all[0].to_string(), "the later name", |row| {
        row["names"]
            .as_array()
            .is_some_and(|names| names.len() == 2)
    });
    for to in &all[..2] {
        let row = agent.row(&to.to_string());
        assert_eq!(row["state"], "open", "{row:#}");
        assert_eq!(row["bypassed_for_safety"], false, "{row:#}");
    }
}

/// Whoever answers decides what is heard: it may name an address, and no more.
#[test]
fn what_is_heard_protects_nothing_and_breaks_nothing() {
    need!("python3");
    let scene = Scene::new("hostile");
    let config = "[protected]\ndestinations = [\"*.vault\"]\n[[policy]]\nname = \"v\"\n\
                  destinations = [\"a.vault\"]\nbreaker = { redial = false }\n";
    let agent = Agent::start_for_loops(&scene.group, config);
    scene.dns.addresses("a.vault", &[TO.ip()]);
    let mut python = scene.python();
    let mut fail = || {
        let refused = python.errno("socket.create_connection((\"a.vault\", 8080), 60)");
        assert_eq!(refused, libc::ECONNREFUSED);
    };
    fail();
    agent.wait_row(DESTINATION, "the policy", |row| row["policy"] == "v");
    for _ in 0..5 {
        fail();
    }
    agent.wait_state(DESTINATION, "open");

    // Messages of all kinds from port 53 to a socket of the workload.
    python.value("(u := socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) and 0");
    python.value("u.bind((\"10.77.0.1\", 5300))");
    python.value("u.settimeout(60)");
    let answer = |name: &[u8], claimed: u16| {
        let mut message = vec![0, 7, 0x81, 0x80];
        for count in [1, claimed, 0, 0] {
            message.extend(count.to_be_bytes());
        }
        message.extend(name);
        message.extend([
            0, 1, 0, 1, 0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 60, 0, 4, 10, 77, 0, 9,
        ]);
        message
    };
    let hostile = [
        answer(b"\x04\x1b[2J\x00", 1),
        answer(b"\x3fshort\x00", 1),
        answer(b"\xc0\x0c", 1),
        answer(b"\x01a\x00", 65535),
        vec![0xff; 1232],
        [answer(b"\x01a\x00", 1), vec![0; 2000]].concat(),
        vec![0, 7, 0x81, 0x80, 0, 1, 0, 1],
    ];
    // Another address than the server's, as port 53 of that is taken.
    scene.net.server.ip("addr add 10.77.0.4/24 dev s0\n");
    let socket = scene
        .net
        .server
        .enter(|| UdpSocket::bind("10.77.0.4:53").expect("port 53"));
    for message in &hostile {
        socket.send_to(message, "10.77.0.1:5300").expect("send");
    }
    // After them a good one: its name comes, theirs do not.
    let good = answer(&wire("good.example"), 1);
    socket.send_to(&good, "10.77.0.1:5300").expect("send");
    for message in hostile.iter().chain([&good]) {
        let length = python.value("len(u.recv(4096))");
        assert_eq!(length, message.len());
    }
    let told = wait::until("the good name", SOON, || {
        let explained = agent.command(&["explain", "good.example:80"]);
        explained.status.success().then_some(explained.stdout)
    });
    assert!(told.contains("10.77.0.9:80"), "{told}");
    let explained = agent.command(&["explain", "10.77.0.9:80", "--json"]).good();
    let explained: Value = serde_json::from_str(&explained).expect("JSON");
    assert_eq!(
        explained["names"],
        serde_json::json!(["good.example"]),
        "{explained:#}"
    );
}

/// An address that goes to another name is somebody else's (rule 19): its breaker starts anew, once the old
/// name's minute is over.
#[test]
fn an_address_that_goes_to_another_name_starts_anew() {
    need!("python3");
    let scene = Scene::new("owner");
    let config = "[defaults.breaker]\nredial = false\ncooldown = \"10m\"\ncooldown_max = \"10m\"\n";
    let agent = Agent::start_for_loops(&scene.group, config);
    let mut python = scene.python();
    let refused = |python: &mut Interpreter, name: &str| {
        let dialled = format!("socket.create_connection(({name:?}, 8080), 60)");
        assert_eq!(python.errno(&dialled), libc::ECONNREFUSED);
    };
    let told = |python: &mut Interpreter, name: &str| {
        python.value(&format!("len(socket.getaddrinfo({name:?}, 8080))"));
    };
    scene.dns.addresses("old.internal", &[TO.ip()]);
    for _ in 0..5 {
        refused(&mut python, "old.internal");
    }
    agent.wait_state(DESTINATION, "open");
    named(&agent, DESTINATION, "old.internal");
    // The old name moves on, and a new one comes.
    scene
        .dns
        .addresses("old.internal", &["10.77.0.9".parse().expect("an address")]);
    scene.dns.addresses("new.internal", &[TO.ip()]);
    told(&mut python, "old.internal");
    told(&mut python, "new.internal");
    assert_eq!(
        agent.row(DESTINATION)["state"],
        "open",
        "both names hold for a minute"
    );
    // Longer than a name's shortest time.
    wait::until("the new owner", Duration::from_secs(180), || {
        let row = agent.row(DESTINATION);
        (row["state"] == "closed" && row["name"] == "new.internal").then_some(())
    });
    let windows = &agent.row(DESTINATION)["windows"]["connects"];
    assert_eq!(windows["calls"], 0, "{windows:#}");
    // Its first failure is the first.
    refused(&mut python, "new.internal");
    agent.wait_row(DESTINATION, "one failure", |row| {
        row["windows"]["connects"]["failures"] == 1 && row["state"] == "closed"
    });
}

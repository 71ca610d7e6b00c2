//! Names of destinations: policies and orders by name, for programs that only ever see addresses.

use std::{net::SocketAddr, time::Duration};

use tests::{
    agent::{Agent, AgentOptions},
    cgroup::TestCgroup,
    dialer::Dialer,
    names::EtcFiles,
    net::TestNet,
    server::Server,
};

const DIAL: &str = env!("CARGO_BIN_EXE_dial");
const TO: SocketAddr = TestNet::server4(8080);
const DESTINATION: &str = "10.77.0.2:8080";

/// An agent that resolves by these files.
fn start(group: &TestCgroup, config: &str, etc: &EtcFiles) -> Agent {
    let options = AgentOptions::new(group).config_for_loops(config);
    options.start_as(etc.program(options.program()))
}

/// What a policy says about a name holds for the very first connect: the agent has looked it up.
#[test]
fn a_policy_by_name_holds_from_the_first_connect() {
    let (net, group) = (TestNet::new(), TestCgroup::new("by-name"));
    let silent = SocketAddr::new(TestNet::blackhole4(0), 5432);
    let etc = EtcFiles::new(&format!("{} db.internal\n", silent.ip()), None);
    let config = r#"
        [[policy]]
        name = "db"
        destinations = ["DB.internal.:5432"]
        timeouts = { connect = "300ms" }
        [[policy]]
        name = "net"
        destinations = ["10.77.0.100:5432"]
        timeouts = { connect = "1m" }
    "#;
    let agent = start(&group, config, &etc);
    let mut dialer = Dialer::start(DIAL, &group, &net.client);
    let dialed = dialer.connect(silent);
    assert_eq!(dialed.errno, libc::ETIMEDOUT);
    assert!(dialed.elapsed < Duration::from_secs(30), "{dialed:?}");
    let named = |row: &serde_json::Value| row["name"] == "db.internal";
    let row = agent.wait_row(&silent.to_string(), "its name", named);
    assert_eq!(row["policy"], "db", "{row:#}");
    // The name is named with a port.
    let other = SocketAddr::new(silent.ip(), 81);
    assert_eq!(dialer.connect(other).errno, libc::ETIMEDOUT);
    let row = agent.wait_row(&other.to_string(), "its name", named);
    assert_eq!(row["policy"], "default", "{row:#}");
}

/// A name that gets one more address, and a policy whose name is there only after a reload.
#[test]
fn rows_that_exist_get_the_policy_when_a_name_is_learned() {
    let (net, group) = (TestNet::new(), TestCgroup::new("learned"));
    let _server = Server::start(&net.server, TO);
    let etc = EtcFiles::new("10.99.0.1 db.internal\n", None);
    let config = |connect: &str| {
        format!(
            "[[policy]]\nname = \"db\"\ndestinations = [\"db.internal\"]\n\
             timeouts = {{ connect = {connect:?} }}\n"
        )
    };
    let agent = start(&group, &config("700ms"), &etc);
    let mut dialer = Dialer::start(DIAL, &group, &net.client);
    assert_eq!(dialer.connect(TO).errno, 0);
    let row = agent.row(DESTINATION);
    assert_eq!(
        (&row["policy"], &row["name"]),
        (&"default".into(), &serde_json::Value::Null)
    );
    etc.hosts("10.77.0.2 db.internal\n");
    // A reload looks names up at once.
    agent.home().write_config(&config("800ms"));
    let row = agent.wait_row(DESTINATION, "the policy of the name", |row| {
        row["policy"] == "db"
    });
    assert_eq!(row["name"], "db.internal", "{row:#}");
    assert_eq!(row["timeouts_ms"]["connect"], 800, "{row:#}");
    // Without the policy nobody names it any more.
    agent.home().write_config("");
    let row = agent.wait_row(DESTINATION, "the defaults", |row| {
        row["policy"] == "default"
    });
    assert_eq!(row["timeouts_ms"]["connect"], 2000, "{row:#}");
    agent.wait_row(DESTINATION, "no name", |row| row["name"].is_null());
}

/// Orders and questions by name are about all of its addresses, with that port.
#[test]
fn commands_take_names() {
    let (net, group) = (TestNet::new(), TestCgroup::new("commands"));
    net.server.ip("addr add 10.77.0.3/24 dev s0\n");
    let addresses = ["10.77.0.2:8080", "10.77.0.3:8080"];
    let _servers: Vec<_> = addresses
        .iter()
        .map(|address| Server::start(&net.server, address.parse().expect("an address")))
        .collect();
    let etc = EtcFiles::new("10.77.0.2 web.internal\n10.77.0.3 web.internal\n", None);
    let config = "[[policy]]\nname = \"web\"\ndestinations = [\"web.internal\"]\n";
    let agent = start(&group, config, &etc);
    let mut dialer = Dialer::start(DIAL, &group, &net.client);
    let connect = |dialer: &mut Dialer, address: &str| {
        dialer.connect(address.parse().expect("an address")).errno
    };
    // One has a row, the other one not yet.
    assert_eq!(connect(&mut dialer, addresses[0]), 0);
    agent.command(&["trip", "web.internal:8080"]).good();
    agent.wait_state(addresses[0], "forced_open");
    for address in addresses {
        assert_eq!(
            connect(&mut dialer, address),
            libc::ECONNREFUSED,
            "{address}"
        );
    }
    // The word is about one port.
    let other = TestNet::server4(8081);
    assert_eq!(dialer.connect(other).errno, libc::ECONNREFUSED);
    agent.wait_row(&other.to_string(), "its own refusal", |row| {
        row["failures"]["refused"] == 1
    });

    // (A row that the kernel has just made is known to the agent a moment later.)
    for address in addresses {
        agent.wait_row(address, "who ordered it", |row| {
            row["manual"]["by"].is_string()
        });
    }
    let listed = agent
        .command(&["status", "WEB.internal:8080", "--json"])
        .good();
    let status: serde_json::Value = serde_json::from_str(&listed).expect("JSON");
    let rows = status["destinations"].as_array().expect("rows");
    let mut shown: Vec<_> = rows
        .iter()
        .map(|row| row["destination"].as_str().unwrap())
        .collect();
    shown.sort_unstable();
    assert_eq!(shown, addresses);
    for row in rows {
        assert_eq!(row["state"], "forced_open", "{row:#}");
        assert!(row["manual"]["by"].is_string(), "{row:#}");
    }
    let explained = agent.command(&["explain", "web.internal:8080"]).good();
    for wanted in [
        "web.internal:8080",
        "10.77.0.3:8080",
        "web: destination web.internal matches",
    ] {
        assert!(explained.contains(wanted), "{explained}");
    }

    agent.command(&["reset", "web.internal:8080"]).good();
    for address in addresses {
        agent.wait_state(address, "closed");
        assert_eq!(connect(&mut dialer, address), 0, "{address}");
    }
    // A name that nobody has heard of.
    let unknown = agent.command(&["explain", "nobody.internal:1"]);
    assert_eq!(unknown.code(), 1, "{unknown}");
    assert!(unknown.stderr.contains("no address is known"), "{unknown}");
}

/// An order by name survives a restart, and holds from the first connect.
#[test]
fn an_order_by_name_comes_back() {
    let (net, group) = (TestNet::new(), TestCgroup::new("comes-back"));
    let _server = Server::start(&net.server, TO);
    let etc = EtcFiles::new("10.77.0.2 web.internal\n", None);
    let agent = start(&group, "", &etc);
    agent.command(&["trip", "web.internal:8080"]).good();
    let mut dialer = Dialer::start(DIAL, &group, &net.client);
    tests::wait::until("the name to be looked up", tests::wait::LONGEST, || {
        (dialer.connect(TO).errno == libc::ECONNREFUSED).then_some(())
    });
    let options = agent.options().clone();
    assert!(agent.stop().status.success());
    let agent = options.start_as(etc.program(options.program()));
    agent.wait_state(DESTINATION, "forced_open");
    assert_eq!(dialer.connect(TO).errno, libc::ECONNREFUSED);
    agent.command(&["reset", "web.internal:8080"]).good();
    agent.wait_state(DESTINATION, "closed");
}

/// A protected name is protected where the agent has resolved it.
#[test]
fn a_name_protects_what_the_agent_has_resolved_it_to() {
    let (net, group) = (TestNet::new(), TestCgroup::new("guarded"));
    let etc = EtcFiles::new("10.77.0.2 vault.internal\n", None);
    let config = "[protected]\ndestinations = [\"vault.internal:8080\"]\n";
    let agent = start(&group, config, &etc);
    let mut dialer = Dialer::start(DIAL, &group, &net.client);
    for _ in 0..10 {
        assert_eq!(dialer.connect(TO).errno, libc::ECONNREFUSED);
    }
    let row = agent.row(DESTINATION);
    assert_eq!(row["state"], "closed", "{row:#}");
    assert_eq!(row["failures"]["refused"], 10, "{row:#}");
    assert!(row["timeouts_ms"]["connect"].is_null(), "{row:#}");
    let refused = agent.command(&["trip", "vault.internal:8080"]);
    assert!(refused.stderr.contains("is protected"), "{refused}");
}

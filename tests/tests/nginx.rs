//! nginx as an unmodified reverse proxy in the control group, its upstream stopped and started.

use std::{
    io,
    net::{SocketAddr, TcpStream},
};

use tests::{
    agent::{Agent, assert_balanced},
    cgroup::TestCgroup,
    http, need,
    net::TestNet,
    process::{Program, find},
    server::Server,
    wait,
};

const UPSTREAM: SocketAddr = TestNet::server4(8080);
const DESTINATION: &str = "10.77.0.2:8080";
const PROXY: &str = "127.0.0.1:8000";

/// One request to the proxy; its status.
fn ask(net: &TestNet) -> io::Result<u16> {
    net.client.enter(|| {
        let stream = TcpStream::connect(PROXY)?;
        http::request(stream, "GET", "/").map(|response| response.status)
    })
}

#[test]
fn its_upstream_may_go_and_come_back() {
    need!("nginx");
    let net = TestNet::new();
    let group = TestCgroup::new("nginx");
    let agent = Agent::start(&group, "");
    let directory = tempfile::tempdir().expect("a directory");
    let at = directory.path().display();
    let config = format!(
        "daemon off;\nworker_processes 2;\npid {at}/pid;\nerror_log {at}/error.log;\n\
         events {{ worker_connections 64; }}\n\
         http {{\n\
           access_log off;\n\
           client_body_temp_path {at}/body;\n\
           proxy_temp_path {at}/proxy;\n\
           fastcgi_temp_path {at}/fastcgi;\n\
           uwsgi_temp_path {at}/uwsgi;\n\
           scgi_temp_path {at}/scgi;\n\
           server {{ listen {PROXY}; location / {{ proxy_pass http://{UPSTREAM}; }} }}\n\
         }}\n"
    );
    let file = directory.path().join("nginx.conf");
    std::fs::write(&file, config).expect("write nginx.conf");
    let server = Server::start(&net.server, UPSTREAM);
    let nginx = Program::new(find("nginx").expect("installed"))
        .args(["-e", "stderr", "-p"])
        .arg(directory.path())
        .arg("-c")
        .arg(&file)
        .in_cgroup(&group)
        .in_netns(&net.client)
        .spawn();
    let listening = || ask(&net).ok();
    let status = wait::until("nginx to listen", wait::LONGEST, listening);
    assert_eq!(status, 200, "{}", nginx.stderr_so_far());
    for _ in 0..20 {
        assert_eq!(ask(&net).expect("an answer"), 200);
    }
    let row = agent.row(DESTINATION);
    assert_eq!(
        (&row["state"], &row["established"]),
        (&"closed".into(), &21.into()),
        "{row:#}"
    );

    server.stop();
    let mut events = agent.follow(&[]);
    for _ in 0..5 {
        assert_eq!(ask(&net).expect("an answer"), 502);
    }
    let open = events.wait_breaker(DESTINATION, "open");
    assert_eq!(open["workload"], group.workload());
    for _ in 0..20 {
        assert_eq!(ask(&net).expect("an answer"), 502);
    }
    let row = agent.row(DESTINATION);
    assert_eq!(row["failures"]["refused"], 5, "{row:#}");
    assert_eq!(row["rejected"]["breaker"], 20, "{row:#}");

    let server = Server::start(&net.server, UPSTREAM);
    events.wait_breaker(DESTINATION, "half_open");
    for _ in 0..2 {
        // The second slot comes with the next verdict.
        wait::until("a probe", wait::LONGEST, || {
            (ask(&net).expect("an answer") == 200).then_some(())
        });
    }
    events.wait_breaker(DESTINATION, "closed");
    for _ in 0..20 {
        assert_eq!(ask(&net).expect("an answer"), 200);
    }
    let row = agent.row(DESTINATION);
    assert_eq!(
        (&row["state"], &row["established"]),
        (&"closed".into(), &43.into()),
        "{row:#}"
    );
    assert_balanced(&row);
    assert!(server.accepts() >= 22);
}

//! Proxies, which try again what they are asked once.

use std::{
    fs,
    io::{BufRead as _, BufReader},
    net::{SocketAddr, TcpStream},
    path::Path,
    time::{Duration, Instant},
};

use super::{Cell, Own, Scene, TO};
use crate::{
    http,
    process::{Program, find},
    wait,
};

/// Where a proxy listens, in the clients' namespace.
const PROXY: SocketAddr =
    SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 8000);
const SOON: Duration = Duration::from_secs(30);

/// nginx; its log has the servers that it has asked for each call.
pub fn nginx(scene: &Scene, cell: &Cell) -> Own {
    let directory = tempfile::tempdir().expect("a directory");
    let at = directory.path().display();
    // (A server that is named again may be asked again.)
    let servers = format!("server {TO} max_fails=0; ").repeat(cell.caller.retries as usize + 1);
    let next = if cell.caller.retries > 0 {
        "error timeout http_503"
    } else {
        "off"
    };
    let config = format!(
        "daemon off;\nworker_processes 1;\npid {at}/pid;\nerror_log {at}/error.log;\n\
         events {{ worker_connections 1024; }}\n\
         http {{\n\
           log_format servers '$upstream_addr';\n\
           access_log {at}/access.log servers;\n\
           client_body_temp_path {at}/body;\n\
           proxy_temp_path {at}/proxy;\n\
           fastcgi_temp_path {at}/fastcgi;\n\
           uwsgi_temp_path {at}/uwsgi;\n\
           scgi_temp_path {at}/scgi;\n\
           upstream servers {{ {servers} }}\n\
           server {{ listen {PROXY}; location / {{\n\
             proxy_pass http://servers; proxy_next_upstream {next}; }} }}\n\
         }}\n"
    );
    let file = write(directory.path(), &config);
    let program = Program::new(find("nginx").expect("installed"))
        .args(["-e", "stderr", "-c"])
        .arg(file);
    let _proxy = scene.client(program, cell.seconds).spawn();
    let calls = ask(scene, cell);
    // (It writes after it has answered.)
    let log = wait::until("nginx to log all calls", SOON, || {
        let log = fs::read_to_string(directory.path().join("access.log")).ok()?;
        (log.lines().count() as u64 == calls).then_some(log)
    });
    Own {
        calls,
        retries: log.matches(',').count() as u64,
    }
}

/// HAProxy; its log has the retries of each call. (Of two threads that log at once, one may lose its line.)
pub fn haproxy(scene: &Scene, cell: &Cell) -> Own {
    let directory = tempfile::tempdir().expect("a directory");
    let retries = cell.caller.retries;
    let config = format!(
        "global\n  nbthread 1\n  log stdout format raw local0\n\
         defaults\n  mode http\n  timeout connect 5s\n  timeout client 30s\n  timeout server 30s\n\
         \u{20} retries {retries}\n  retry-on all-retryable-errors\n  http-reuse never\n\
         \u{20} log global\n  option dontlognull\n  log-format retries=%rc\n\
         listen proxy\n  bind {PROXY}\n  option http-server-close\n  server one {TO}\n"
    );
    let file = write(directory.path(), &config);
    let program = Program::new(find("haproxy").expect("installed"))
        .args(["-db", "-f"])
        .arg(file);
    let mut proxy = scene.client(program, cell.seconds).spawn();
    let output = proxy.stdout.take().expect("piped");
    let (lines, logged) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        for line in BufReader::new(output).lines().map_while(Result::ok) {
            let number = line
                .strip_prefix("retries=")
                .map(|rest| rest.trim_start_matches('+'));
            if let Some(number) = number.and_then(|number| number.trim().parse::<u64>().ok()) {
                let _ = lines.send(number);
            }
        }
    });
    let calls = ask(scene, cell);
    let logged = (0..calls).map(|_| logged.recv_timeout(SOON).expect("a line for each call"));
    Own {
        calls,
        retries: logged.sum(),
    }
}

fn write(directory: &Path, config: &str) -> std::path::PathBuf {
    let file = directory.join("config");
    fs::write(&file, config).expect("write the configuration");
    file
}

/// Asks the proxy at random times, whether or not others are under way, each time for something else.
/// Returns how often.
fn ask(scene: &Scene, cell: &Cell) -> u64 {
    wait::until("the proxy to listen", SOON, || {
        scene.net.client.enter(|| TcpStream::connect(PROXY)).ok()
    });
    let end = Instant::now() + Duration::from_secs(cell.seconds);
    let mut random = 0x9e37_79b9_7f4a_7c15_u64;
    let mut calls = 0;
    scene.net.client.enter(|| {
        std::thread::scope(|scope| {
            let mut next = Instant::now();
            while next < end {
                let path = format!("/{calls}");
                scope.spawn(move || {
                    let stream = TcpStream::connect(PROXY).expect("the proxy listens");
                    // (Whatever it answers.)
                    let _ = http::request(stream, "GET", &path);
                });
                calls += 1;
                random ^= random >> 12;
                random ^= random << 25;
                random ^= random >> 27;
                let share = (random >> 11) as f64 / (1_u64 << 53) as f64;
                next += Duration::from_secs_f64(-(1.0 - share).ln() / f64::from(cell.rate));
                std::thread::sleep(next.saturating_duration_since(Instant::now()));
            }
        });
    });
    calls
}

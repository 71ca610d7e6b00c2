//! Uploads of real programs.

use serde_json::json;
use tests::{
    clients,
    interpreter::Interpreter,
    need,
    nginx::Nginx,
    process::{Program, python},
    skip,
    talk::{Scene, TO},
};

use crate::{PIECES, config, receive};

/// From a pipe: in chunks, behind an expectation that this server does not answer.
#[test]
fn curl_from_a_pipe() {
    need!("curl");
    let scene = Scene::new("up-curl", &config(), receive);
    let command = format!(
        "(printf one; sleep 2.2; printf two; sleep 2.2; printf three) | \
         curl -q -sS -H 'Expect: 100-continue' -T - http://{TO}/"
    );
    let said = scene.run(Program::new("sh").args(["-c", &command]));
    assert_eq!(said, "ok");
    scene.expect(&[("responses", 1)]);
}

#[test]
fn urllib3_from_a_generator() {
    need!("python3");
    if !clients::has_urllib3() {
        skip!("urllib3 is not installed");
    }
    let scene = Scene::new("up-urllib3", &config(), receive);
    let script = format!(
        "import time, urllib3\n\
         def parts():\n\
         \x20   for part in [b'one', b'0\\r\\n', b'three']:\n\
         \x20       yield part\n\
         \x20       time.sleep(2.2)\n\
         pool = urllib3.PoolManager(retries=False)\n\
         for _ in range(2):\n\
         \x20   assert pool.request('POST', 'http://{TO}/', body=parts()).data == b'ok'\n"
    );
    scene.run(Program::new(python()).args(["-c", &script]));
    scene.expect(&[("responses", 2)]);
}

#[test]
fn node_piece_by_piece() {
    need!("node");
    let scene = Scene::new("up-node", &config(), receive);
    let script = format!(
        "const http = require('http');\n\
         const pause = () => new Promise(done => setTimeout(done, 2200));\n\
         async function upload(headers) {{\n\
         \x20 const request = http.request('http://{TO}/', {{ method: 'PUT', headers }});\n\
         \x20 const answer = new Promise((done, failed) => {{\n\
         \x20   request.on('response', done); request.on('error', failed); }});\n\
         \x20 request.flushHeaders();\n\
         \x20 for (const part of ['one', 'two', 'three']) {{ await pause(); request.write(part); }}\n\
         \x20 await pause();\n\
         \x20 request.end();\n\
         \x20 const response = await answer;\n\
         \x20 if (response.statusCode !== 200) throw new Error('status');\n\
         \x20 response.resume();\n\
         }}\n\
         upload({{ 'Content-Length': 11 }}).then(() => upload({{}})).then(() => process.exit(0),\n\
         \x20 error => {{ console.error(error); process.exit(1); }});\n"
    );
    scene.run(Program::new("node").args(["-e", &script]));
    scene.expect(&[("responses", 2)]);
}

/// A proxy that hands on an upload as it comes.
#[test]
fn nginx_that_does_not_buffer() {
    need!("nginx", "python3");
    let scene = Scene::new("up-nginx", &config(), receive);
    let address = "127.0.0.1:8000".parse().expect("an address");
    let server = format!(
        "listen {address}; location / {{ proxy_pass http://{TO}; proxy_http_version 1.1; \
         proxy_request_buffering off; }}"
    );
    let _nginx = Nginx::start_in(&scene.group, &scene.net.client, address, &server);
    let mut python = Interpreter::start_outside(&scene.net.client);
    python.run(PIECES);
    for sent in [
        "[length(20), b'x' * 10, b'x' * 10]",
        r"[chunks(), b'5\r\nhello\r\n', b'3\r\n0\r\n\r\n', b'0\r\n\r\n']",
    ] {
        python.value("(s := socket.create_connection(('127.0.0.1', 8000))) and 0");
        python.value(&format!("pieces({sent})"));
        let said = python.value("s.recv(99)[9:12].decode()");
        assert_eq!(said, json!("200"), "{sent}");
    }
    scene.expect(&[("responses", 2)]);
}

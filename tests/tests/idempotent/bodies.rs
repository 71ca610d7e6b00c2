//! Bodies that come in packets of their own.

use rustix::process::Signal;
use serde_json::json;

use crate::scene::{COUNTS, ECONNABORTED, REFUSES, Scene};

/// Parts of a program that say how requests come in packets.
const MORE: &str = "
def chunked(*chunks):
    s = connected()
    try:
        s.sendall(request('POST /bad/chunks', 'Transfer-Encoding: chunked'))
        for chunk in [*chunks, '']:
            s.sendall(f'{len(chunk):x}\\r\\n{chunk}\\r\\n'.encode())
        return first_line(s)
    except OSError as error:
        return error.errno
    finally:
        s.close()

def continued(body):
    s = connected()
    try:
        head = request('POST /bad/order', 'Expect: 100-continue', f'Content-Length: {len(body)}')
        s.sendall(head)
        said = first_line(s)
        s.sendall(body.encode())
        return [said, first_line(s)]
    except OSError as error:
        return [said, error.errno]
    finally:
        s.close()

def elsewhere(call):
    import threading
    got = []
    thread = threading.Thread(target=lambda: got.append(call()))
    thread.start()
    thread.join()
    return got[0]
";

fn scene(config: &str) -> Scene {
    let mut scene = Scene::new(config);
    scene.program.run(MORE);
    scene
}

/// A call that fails, and its repetition, which is refused: all of it has reached the server once.
fn is_refused(scene: &mut Scene, call: &str, target: &str) {
    assert_eq!(scene.do_(call), "", "{call}");
    for _ in 0..2 {
        assert_eq!(scene.do_(call), ECONNABORTED, "{call}");
    }
    assert_eq!(scene.reached(&format!("POST {target}")), 1, "{call}");
}

#[test]
fn a_body_in_a_packet_of_its_own_is_refused() {
    let mut scene = scene(REFUSES);
    is_refused(
        &mut scene,
        "apart('POST /bad/order', body='{\"id\": 7}')",
        "/bad/order",
    );
    let row = scene.row();
    assert_eq!(row["retry"]["non_idempotent"], 2, "{row:#}");
    assert_eq!(row["retry"]["non_idempotent_refused"], 2, "{row:#}");
    let told = &scene.events(1)[0];
    assert_eq!(
        (&told["method"], &told["refused"]),
        (&json!("POST"), &json!(true)),
        "{told:#}"
    );
    // However it is cut: what counts are its bytes.
    let cut = "apart('POST /bad/order', body='{\"id\": 7}', packets=3)";
    assert_eq!(scene.do_(cut), ECONNABORTED);
    assert_eq!(
        scene.do_("ask('POST /bad/order', body='{\"id\": 7}')"),
        ECONNABORTED
    );
    assert_eq!(scene.reached("POST"), 1);
}

#[test]
fn long_bodies_are_compared_to_their_last_byte() {
    let mut scene = scene(REFUSES);
    is_refused(
        &mut scene,
        "apart('POST /bad/one', body='ab' * 20000, packets=9)",
        "/bad/one",
    );
    for (target, bodies) in [
        ("begin", ["'a' + 'x' * 30000", "'b' + 'x' * 30000"]),
        (
            "middle",
            [
                "'x' * 15000 + 'a' + 'x' * 15000",
                "'x' * 15000 + 'b' + 'x' * 15000",
            ],
        ),
        ("end", ["'x' * 30000 + 'a'", "'x' * 30000 + 'b'"]),
        // Longer than what is compared.
        ("long", ["'x' * 66000", "'x' * 66000"]),
    ] {
        for body in bodies {
            let call = format!("apart('POST /bad/{target}', body={body}, packets=4)");
            assert_eq!(scene.do_(&call), "", "{call}");
        }
        assert_eq!(scene.reached(&format!("POST /bad/{target}")), 2);
    }
    let row = scene.row();
    assert_eq!(row["retry"]["non_idempotent_refused"], 2, "{row:#}");
}

/// The same head does not make the same request: the body may be another one.
#[test]
fn another_body_passes_and_is_no_repetition() {
    for (config, counted) in [(REFUSES, 0), (COUNTS, 1)] {
        let mut scene = scene(config);
        for number in 0..2 {
            let post = format!("apart('POST /bad/order', body='{{\"id\": {number}}}')");
            assert_eq!(scene.do_(&post), "");
        }
        assert_eq!(scene.reached("POST /bad"), 2);
        let row = scene.row();
        // Without refusals nobody looks at bodies: it may be the same.
        assert_eq!(row["retry"]["non_idempotent"], counted, "{row:#}");
        assert_eq!(row["retry"]["non_idempotent_refused"], 0, "{row:#}");
    }
}

#[test]
fn a_key_or_another_method_passes() {
    let mut scene = scene(REFUSES);
    for call in [
        "apart('POST /bad/key', 'Idempotency-Key: 7', body='{}')",
        "apart('PUT /bad/put', body='{}')",
        "ask('GET /bad/get')",
    ] {
        for _ in 0..3 {
            assert_eq!(scene.do_(call), "", "{call}");
        }
    }
    assert_eq!(scene.reached(""), 9);
    let row = scene.row();
    assert_eq!(row["retry"]["non_idempotent"], 0, "{row:#}");
}

#[test]
fn chunks_are_compared_too() {
    let mut scene = scene(REFUSES);
    assert_eq!(scene.do_("chunked('first', '{\"id\": 8}')"), "");
    is_refused(
        &mut scene,
        "chunked('{\"id\": 7}', 'more')",
        "/bad/chunks HTTP/1.1 {\"id\": 7}more",
    );
    assert_eq!(scene.do_("chunked('{\"id\": 7}', 'more', 'more')"), "");
    assert_eq!(scene.reached("POST"), 3);
}

/// The head waits for an answer: it passes, and the body behind it does not.
#[test]
fn a_client_that_asks_before_it_sends_its_body() {
    let mut scene = scene(REFUSES);
    let calls = ["continued('{\"id\": 7}')"; 2].join(", ");
    let all = scene.do_(&format!("[{calls}, continued('{{\"id\": 8}}')]"));
    let goes_on = "HTTP/1.1 100 Continue";
    assert_eq!(
        all,
        json!([[goes_on, ""], [goes_on, ECONNABORTED], [goes_on, ""]])
    );
    assert_eq!(scene.reached("POST"), 2);
}

/// Which thread dials matters to connect() alone: bytes are a process's.
#[test]
fn what_another_thread_repeats() {
    let mut scene = scene(REFUSES);
    let post = "elsewhere(lambda: apart('POST /bad/order', body='{\"id\": 7}'))";
    is_refused(&mut scene, post, "/bad/order");
}

#[test]
fn observe_mode_lets_bodies_pass() {
    let mut scene = scene(&format!("mode = \"observe\"\n{REFUSES}"));
    for _ in 0..3 {
        assert_eq!(scene.do_("apart('POST /bad/order', body='{}')"), "");
    }
    assert_eq!(scene.reached("POST"), 3);
    let row = scene.row();
    assert_eq!(row["retry"]["non_idempotent_would_refuse"], 2, "{row:#}");
    assert_eq!(row["retry"]["non_idempotent_refused"], 0, "{row:#}");
    assert_eq!(row["retry"]["non_idempotent"], 2, "{row:#}");
}

/// An agent that is stopped refuses nothing: the end of the request leaves with a resend, and is answered.
#[test]
fn a_body_that_has_left_after_all_is_not_ended() {
    let mut scene = scene(REFUSES);
    let post = "apart('POST /ill/order', body='{\"id\": 7}')";
    assert_eq!(scene.do_(post), "HTTP/1.1 503 No");
    scene.agent.signal(Signal::STOP);
    let got = scene.do_(post);
    scene.agent.signal(Signal::CONT);
    assert_eq!(got, "HTTP/1.1 503 No");
    let row = scene.row();
    assert_eq!(row["retry"]["non_idempotent"], 1, "{row:#}");
    assert_eq!(row["retry"]["non_idempotent_refused"], 0, "{row:#}");
    assert_eq!(scene.reached("POST"), 2);
}

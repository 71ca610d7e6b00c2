//! Syslog over TCP: a protocol without answers. Nobody is judged for them.

use tests::{
    agent::Agent,
    interpreter::Interpreter,
    need,
    outcome::{expect, judged},
    place::{DESTINATION, Place, TO},
    process::Program,
    server::Server,
    talk::wait_end,
};

fn sink(label: &str) -> (Place, Server, Agent) {
    let place = Place::new(label);
    let server = Server::with(&place.net.server, TO, wait_end);
    let agent = Agent::start(&place.group, "");
    (place, server, agent)
}

#[test]
fn logger_says_something_and_goes() {
    need!("logger");
    let (place, server, agent) = sink("logger");
    for _ in 0..10 {
        let logger = Program::new("logger").args(["-T", "-n", "10.77.0.2", "-P", "8080", "hello"]);
        place.client(logger).run().good();
    }
    let row = expect(&agent, DESTINATION, &[("abandoned", 10)]);
    assert_eq!(judged(&row), (0, 0), "{row:#}");
    assert_eq!(row["state"], "closed", "{row:#}");
    server.wait_accepts(10);
}

/// Long after its last message the program closes the connection: nobody gave up on anything.
#[test]
fn a_handler_that_lives_for_long_is_not_judged() {
    need!("python3");
    let (place, _server, agent) = sink("handler");
    let mut python = Interpreter::start(&place.group, &place.net.client);
    python.value("(logging := __import__('logging')) and __import__('logging.handlers') and 0");
    let new = "logging.handlers.SysLogHandler(('10.77.0.2', 8080), socktype=socket.SOCK_STREAM)";
    for _ in 0..6 {
        python.value(&format!("(handler := {new}) and 0"));
        let record = "logging.makeLogRecord({'msg': 'hello', 'levelname': 'INFO'})";
        python.value(&format!(
            "[handler.emit({record}) for _ in range(20)] and 0"
        ));
        let row = agent.row(DESTINATION);
        assert_eq!(row["in_flight"], 1, "{row:#}");
        // Longer than `gave_up`.
        python.value("time.sleep(0.6)");
        python.value("handler.close()");
    }
    let row = expect(&agent, DESTINATION, &[("gave_up", 6)]);
    assert_eq!(judged(&row), (0, 0), "{row:#}");
    assert_eq!(row["state"], "closed", "{row:#}");
}

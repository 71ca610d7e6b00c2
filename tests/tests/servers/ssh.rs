//! OpenSSH: both sides speak first, and the server may ask while the client works.

use std::{fs, time::Duration};

use rustix::process::Signal;
use tests::{
    need,
    place::{ANY, Place, START, case, check},
    process::{Program, Running, find},
};

/// What a client says last is encrypted, and looks like a request, which it does not wait for; a server
/// that closes first is no failure either.
const FAREWELL: &[(&str, u64)] = &[("abandoned", ANY)];

/// A server.
struct Ssh {
    place: Place,
    server: Option<Running>,
}

impl Ssh {
    fn start() -> Self {
        // Where the service's own unit makes it, and where it is not cleared away.
        fs::create_dir_all("/run/sshd").expect("make the directory that sshd asks for");
        let mut ssh = Self {
            place: Place::new("ssh"),
            server: None,
        };
        for key in ["host", "client", "stranger"] {
            Program::new("ssh-keygen")
                .args(["-q", "-t", "ed25519", "-N", "", "-f", &ssh.path(key)])
                .run()
                .good();
        }
        let config = format!(
            "ListenAddress 10.77.0.2:8080\nHostKey {}\nAuthorizedKeysFile {}\nPidFile none\n\
             StrictModes no\nUsePAM no\nPermitRootLogin yes\nPasswordAuthentication no\n\
             ClientAliveInterval 1\n",
            ssh.path("host"),
            ssh.path("client.pub"),
        );
        fs::write(ssh.path("config"), config).expect("write a file");
        // It starts itself anew for each connection, so its path must be whole.
        let sshd = Program::new(find("sshd").expect("installed"));
        let sshd = sshd.args(["-D", "-e", "-f", &ssh.path("config")]);
        ssh.server = Some(ssh.place.server(sshd).spawn());
        ssh
    }

    fn path(&self, name: &str) -> String {
        let path = self.place.directory.path().join(name);
        path.to_str().expect("ASCII").to_owned()
    }

    fn ssh(&self, key: &str, command: &str) -> Program {
        let ssh = Program::new("ssh")
            .args([
                "-F",
                "none",
                "-o",
                "BatchMode=yes",
                "-o",
                "IdentitiesOnly=yes",
            ])
            .args([
                "-o",
                "StrictHostKeyChecking=no",
                "-o",
                "UserKnownHostsFile=/dev/null",
            ])
            .args([
                "-i",
                &self.path(key),
                "-p",
                "8080",
                "root@10.77.0.2",
                command,
            ]);
        self.place.client(ssh.within(START))
    }
}

#[test]
fn well_and_not_well() {
    need!("sshd", "ssh", "ssh-keygen");
    let mut ssh = Ssh::start();
    let agent = ssh.place.agent();
    let cases = [
        case(
            "commands",
            |ssh: &mut Ssh, _| {
                for _ in 0..2 {
                    assert_eq!(ssh.ssh("client", "echo hello").run().good(), "hello\n");
                }
            },
            4..=60,
            FAREWELL,
        ),
        case(
            "a stranger",
            |ssh, _| {
                let denied = ssh.ssh("stranger", "true").run();
                assert!(denied.stderr.contains("Permission denied"), "{denied}");
            },
            2..=30,
            FAREWELL,
        ),
        case(
            "a command of three seconds, and a server that looks after its client",
            |ssh, _| {
                let finished = ssh.ssh("client", "sleep 3").run();
                assert!(finished.elapsed >= Duration::from_secs(3), "{finished}");
                finished.good();
            },
            2..=30,
            FAREWELL,
        ),
        case(
            "nobody listens",
            |ssh, _| {
                let mut server = ssh.server.take().expect("it runs");
                server.signal(Signal::TERM);
                server.extend_deadline(START);
                server.wait();
                assert_eq!(ssh.ssh("client", "true").run().code(), 255);
            },
            0..=0,
            &[("refused", 1)],
        ),
    ];
    check(&mut ssh, &agent, &cases);
}

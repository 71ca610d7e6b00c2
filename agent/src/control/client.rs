//! The command line's end of the control interface.

use std::{
    io,
    path::{Path, PathBuf},
    time::Duration,
};

use http_body_util::{BodyExt, Empty};
use hyper::{
    Method, Request, StatusCode,
    body::{Bytes, Incoming},
};
use hyper_util::rt::TokioIo;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use tokio::net::UnixStream;

use super::api::ErrorBody;

/// Longest wait for the head of an answer; longer than the server's own patience with the daemon.
const ANSWER: Duration = Duration::from_secs(20);

/// What stays readable in a path or a query: all else is percent-encoded.
const PLAIN: &AsciiSet = &NON_ALPHANUMERIC
    .remove(b'.')
    .remove(b'-')
    .remove(b'_')
    .remove(b':')
    .remove(b'[')
    .remove(b']');

/// Percent-encodes one segment of a path or one value of a query.
pub fn encode(text: &str) -> String {
    utf8_percent_encode(text, PLAIN).to_string()
}

/// Longest path of a socket: `sun_path` without its final zero (unix(7)).
const SOCKET_PATH_BYTES: usize = 107;

/// Says so if no program could reach a socket of this path, however it was made.
pub fn too_long(socket: &Path) -> Option<String> {
    let bytes = socket.as_os_str().len();
    (bytes > SOCKET_PATH_BYTES).then(|| {
        format!(
            "--socket {}: {bytes} bytes, and no program can connect to a socket whose path is longer than \
             {SOCKET_PATH_BYTES}; choose a shorter one",
            socket.display()
        )
    })
}

/// Why a request brought no answer, or a bad one.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// Nobody answers on the socket.
    #[error("no agent answers on {}: {source}; {}", .socket.display(), hint(source))]
    Unreachable {
        /// The socket.
        socket: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// No program could reach a socket of this path.
    #[error("{0}")]
    TooLong(String),
    /// Somebody listens there and says nothing, or accepts nothing.
    #[error("the agent on {} is there but does not answer (is it stopped or overloaded?)", .socket.display())]
    Silent {
        /// The socket.
        socket: PathBuf,
    },
    /// The connection broke, or what came is not HTTP.
    #[error("the agent on {} went away before its answer was complete: {source}", .socket.display())]
    Broken {
        /// The socket.
        socket: PathBuf,
        /// What HTTP said.
        source: hyper::Error,
    },
    /// The agent answered with an error.
    #[error("{message}")]
    Refused {
        /// HTTP status, 400 or more.
        status: u16,
        /// The agent's own words.
        message: String,
    },
}

fn hint(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::PermissionDenied => "the socket belongs to root: use sudo",
        _ => "start it with `backstop run`, or name its socket with --socket or BACKSTOP_SOCKET",
    }
}

impl ClientError {
    /// Exit code of a command that ended with this: 1 failed, 2 bad usage, 3 not reachable.
    pub fn exit_code(&self) -> u8 {
        match self {
            // Broken: it went away in the middle.
            Self::Unreachable { .. } | Self::Silent { .. } | Self::Broken { .. } => 3,
            Self::Refused { status: 400, .. } | Self::TooLong(_) => 2,
            Self::Refused { .. } => 1,
        }
    }
}

/// Talks to the agent on one socket. A connection per request.
#[derive(Clone, Debug)]
pub struct Client {
    socket: PathBuf,
    patience: Duration,
}

impl Client {
    /// For the agent on `socket`.
    pub fn new(socket: &Path) -> Self {
        Self {
            socket: socket.to_owned(),
            patience: ANSWER,
        }
    }

    /// The same, but waits no longer than `patience` for the head of an answer.
    pub fn with_patience(mut self, patience: Duration) -> Self {
        self.patience = patience;
        self
    }

    /// The whole body of `GET target`.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn get(&self, target: &str) -> Result<Bytes, ClientError> {
        let mut answer = self.request(Method::GET, target).await?;
        answer.rest().await
    }

    /// The whole body of `POST target`.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn post(&self, target: &str) -> Result<Bytes, ClientError> {
        let mut answer = self.request(Method::POST, target).await?;
        answer.rest().await
    }

    /// The body of `GET target` piece by piece, as it comes.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn stream(&self, target: &str) -> Result<Pieces, ClientError> {
        self.request(Method::GET, target).await
    }

    async fn request(&self, method: Method, target: &str) -> Result<Pieces, ClientError> {
        tokio::time::timeout(self.patience, self.exchange(method, target))
            .await
            .unwrap_or_else(|_| {
                Err(ClientError::Silent {
                    socket: self.socket.clone(),
                })
            })
    }

    async fn exchange(&self, method: Method, target: &str) -> Result<Pieces, ClientError> {
        let broken = |source| ClientError::Broken {
            socket: self.socket.clone(),
            source,
        };
        if let Some(why) = too_long(&self.socket) {
            return Err(ClientError::TooLong(why));
        }
        let socket = self.socket.clone();
        let stream = match UnixStream::connect(&self.socket).await {
            Ok(stream) => stream,
            // Its backlog is full.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                return Err(ClientError::Silent { socket });
            }
            Err(source) => return Err(ClientError::Unreachable { socket, source }),
        };
        let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
            .await
            .map_err(broken)?;
        // Ends with the exchange; what goes wrong on it is told to the request, too.
        tokio::spawn(connection);
        let request = Request::builder()
            .method(method)
            .uri(target)
            .header(hyper::header::HOST, "backstop")
            .body(Empty::<Bytes>::new())
            .map_err(|e| ClientError::Refused {
                status: StatusCode::BAD_REQUEST.as_u16(),
                message: format!("{target}: {e}"),
            })?;
        let response = sender.send_request(request).await.map_err(broken)?;
        let status = response.status();
        let mut pieces = Pieces {
            socket: self.socket.clone(),
            body: response.into_body(),
        };
        if status.is_success() {
            return Ok(pieces);
        }
        let body = pieces.rest().await?;
        let message = match serde_json::from_slice::<ErrorBody>(&body) {
            Ok(body) => body.error,
            Err(_) => format!("the agent answered {status}"),
        };
        Err(ClientError::Refused {
            status: status.as_u16(),
            message,
        })
    }
}

/// A body that is on its way.
pub struct Pieces {
    socket: PathBuf,
    body: Incoming,
}

impl Pieces {
    /// The next piece; `None` at the end.
    ///
    /// # Errors
    /// [`ClientError::Broken`] when the connection ends before the body does.
    pub async fn next(&mut self) -> Result<Option<Bytes>, ClientError> {
        while let Some(frame) = self.body.frame().await {
            let frame = frame.map_err(|source| ClientError::Broken {
                socket: self.socket.clone(),
                source,
            })?;
            if let Ok(piece) = frame.into_data() {
                return Ok(Some(piece));
            }
        }
        Ok(None)
    }

    async fn rest(&mut self) -> Result<Bytes, ClientError> {
        let mut all = Vec::new();
        while let Some(piece) = self.next().await? {
            all.extend_from_slice(&piece);
        }
        Ok(all.into())
    }
}

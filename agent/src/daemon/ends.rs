//! Where the agent answers: the control socket, and the TCP listener.

use anyhow::{Context as _, Result};
use tokio::net::{TcpListener, UnixListener};

use super::takeover::Live;
use crate::{
    cli::{Listen, RunArgs},
    control::server::{ControlSocket, bind_control, bind_http},
};

/// Both of them.
pub struct Ends {
    /// The control socket.
    pub control: UnixListener,
    /// Its file.
    pub socket: ControlSocket,
    /// The listener, if one is wanted.
    pub http: Option<TcpListener>,
}

impl Ends {
    /// Opens both.
    ///
    /// # Errors
    /// When one of them is in use, or cannot be had.
    pub async fn open(args: &RunArgs) -> Result<Self> {
        let (control, socket) = bind_control(&args.socket, false)?;
        let http = http(args).await?;
        Ok(Self {
            control,
            socket,
            http,
        })
    }

    /// Ends the agent before, which this one has joined in enforcing, and takes its places.
    ///
    /// # Errors
    /// As [`Ends::open`]; and when the agent before does not take the order: then it is still in charge.
    pub async fn take_over(live: &Live, args: &RunArgs) -> Result<Self> {
        live.tell().await?;
        // There is no moment without a socket. The port is free when the other one has ended.
        let (control, socket) = bind_control(&args.socket, true)?;
        live.ended().await;
        let http = http(args).await?;
        Ok(Self {
            control,
            socket,
            http,
        })
    }

    /// The listener's address, or none.
    ///
    /// # Errors
    /// When the system does not tell it.
    pub fn listening(&self) -> Result<String> {
        let address = self.http.as_ref().map(TcpListener::local_addr);
        let address = address.transpose().context("name the listener")?;
        Ok(address.map_or("none".to_owned(), |address| address.to_string()))
    }
}

async fn http(args: &RunArgs) -> Result<Option<TcpListener>> {
    Ok(match args.listen {
        Listen::None => None,
        Listen::Address(address) => Some(bind_http(address).await?),
    })
}

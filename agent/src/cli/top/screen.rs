//! The terminal: a screen of its own while `top` runs, and given back as it was, however it ends.

use std::{
    io::{self, IsTerminal as _, Stdin, Write as _},
    os::fd::{AsFd as _, AsRawFd, RawFd},
};

use rustix::termios::{
    LocalModes, OptionalActions, SpecialCodeIndex, Termios, tcgetattr, tcgetwinsize, tcsetattr,
};
use tokio::io::{Interest, unix::AsyncFd};

/// The other screen, no cursor, no lines that run over the edge.
const ENTER: &[u8] = b"\x1b[?1049h\x1b[?25l\x1b[?7l";
/// All of that undone.
const LEAVE: &[u8] = b"\x1b[?7h\x1b[?25h\x1b[?1049l";
/// Where the terminal does not say: what terminals have had for fifty years.
const SIZE: (usize, usize) = (80, 24);

/// What somebody has typed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Key {
    /// q, or Ctrl-C.
    End,
    /// Anything else.
    Other,
}

/// See the module.
pub struct Screen {
    /// Keys; none where the input is no terminal.
    keys: Option<Keys>,
}

struct Keys {
    input: AsyncFd<Input>,
    /// As it was.
    before: Termios,
}

struct Input(Stdin);

impl AsRawFd for Input {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

impl Screen {
    /// Takes the terminal.
    ///
    /// # Errors
    /// When it cannot be set or written to: then it is as it was.
    pub fn open() -> io::Result<Self> {
        let keys = match io::stdin().is_terminal() {
            true => Some(Keys::open()?),
            false => None,
        };
        // From here on the drop gives it back.
        let screen = Self { keys };
        write(ENTER)?;
        Ok(screen)
    }

    /// Columns and lines.
    pub fn size(&self) -> (usize, usize) {
        match tcgetwinsize(io::stdout()) {
            Ok(size) if size.ws_col > 0 && size.ws_row > 0 => {
                (usize::from(size.ws_col), usize::from(size.ws_row))
            }
            _ => SIZE,
        }
    }

    /// Puts these lines on it, in one write: no flicker.
    ///
    /// # Errors
    /// When the terminal is gone.
    pub fn show(&mut self, lines: &[String]) -> io::Result<()> {
        let mut text = String::from("\x1b[H");
        for (at, line) in lines.iter().enumerate() {
            if at > 0 {
                text.push_str("\r\n");
            }
            text.push_str(line);
            text.push_str("\x1b[K");
        }
        text.push_str("\x1b[J");
        write(text.as_bytes())
    }

    /// Waits for a key.
    ///
    /// # Errors
    /// When the terminal is gone.
    pub async fn key(&mut self) -> io::Result<Key> {
        match &self.keys {
            Some(keys) => keys.next().await,
            None => std::future::pending().await,
        }
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        // The terminal may be gone.
        let _ = write(LEAVE);
        if let Some(keys) = &self.keys {
            // With what was typed meanwhile thrown away: it was not meant for the shell.
            let _ = tcsetattr(io::stdin(), OptionalActions::Flush, &keys.before);
        }
    }
}

impl Keys {
    fn open() -> io::Result<Self> {
        let before = tcgetattr(io::stdin())?;
        let mut raw = before.clone();
        // Keys one by one, not shown; Ctrl-C and Ctrl-Z are keys, so that nobody ends or stops us in the
        // middle. A read returns what is there, or nothing.
        raw.local_modes -= LocalModes::ICANON | LocalModes::ECHO | LocalModes::ISIG;
        raw.special_codes[SpecialCodeIndex::VMIN] = 0;
        raw.special_codes[SpecialCodeIndex::VTIME] = 0;
        tcsetattr(io::stdin(), OptionalActions::Now, &raw)?;
        let input = Input(io::stdin());
        // SAFETY: standard input is open for as long as the process runs: nobody here closes it.
        match unsafe { AsyncFd::register_with_interest(input, Interest::READABLE) } {
            Ok(input) => Ok(Self { input, before }),
            Err(error) => {
                let _ = tcsetattr(io::stdin(), OptionalActions::Now, &before);
                Err(error.into())
            }
        }
    }

    async fn next(&self) -> io::Result<Key> {
        let mut ready = self.input.readable().await?;
        let mut typed = [0; 64];
        let count = rustix::io::read(self.input.get_ref().0.as_fd(), &mut typed)?;
        if count < typed.len() {
            ready.clear_ready();
        }
        const CTRL_C: u8 = 3;
        let is_end = |byte: &u8| matches!(byte, b'q' | b'Q' | &CTRL_C);
        Ok(match typed[..count].iter().any(is_end) {
            true => Key::End,
            false => Key::Other,
        })
    }
}

fn write(bytes: &[u8]) -> io::Result<()> {
    let mut stdout = io::stdout().lock();
    stdout.write_all(bytes)?;
    stdout.flush()
}

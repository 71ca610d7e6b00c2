//! Where commands write to.

use std::io::{self, IsTerminal, Write};

/// Columns when the width is not known.
const WIDTH: usize = 100;

/// Standard output, or a buffer in tests, with what is to be known about it.
pub struct Output<'a> {
    writer: Box<dyn Write + 'a>,
    /// Whether colours may be used.
    pub colour: bool,
    /// A terminal on which something can be shown live.
    pub live: bool,
    /// Columns.
    pub width: usize,
}

impl Output<'_> {
    /// Standard output: coloured only on a terminal and without NO_COLOR; as wide as COLUMNS or
    /// the terminal says, else 100 columns.
    pub fn stdout() -> Self {
        let stdout = io::stdout();
        let terminal = stdout.is_terminal();
        let plain = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
        let dumb = std::env::var_os("TERM").is_some_and(|value| value == "dumb");
        let asked = std::env::var("COLUMNS")
            .ok()
            .and_then(|value| value.parse().ok());
        let width = asked
            .or_else(|| if terminal { terminal_width() } else { None })
            .unwrap_or(WIDTH);
        Self {
            writer: Box::new(io::BufWriter::new(stdout)),
            colour: terminal && !plain && !dumb,
            live: terminal && !dumb,
            width: width.max(80),
        }
    }
}

impl<'a> Output<'a> {
    /// Into a buffer, as to a pipe.
    #[cfg(test)]
    pub fn to(writer: impl Write + 'a) -> Self {
        Self {
            writer: Box::new(writer),
            colour: false,
            live: false,
            width: WIDTH,
        }
    }
}

impl Write for Output<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.writer.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.writer.flush()
    }
}

fn terminal_width() -> Option<usize> {
    let mut size = libc::winsize {
        ws_row: 0,
        ws_col: 0,
        ws_xpixel: 0,
        ws_ypixel: 0,
    };
    // SAFETY: TIOCGWINSZ writes one winsize to the address given, which is one.
    let done = unsafe { libc::ioctl(libc::STDOUT_FILENO, libc::TIOCGWINSZ, &mut size) };
    (done == 0 && size.ws_col > 0).then_some(usize::from(size.ws_col))
}

"""Asks for / with urllib3."""
import re
import sys

import urllib3

try:
    response = urllib3.PoolManager().request("GET", f"http://{sys.argv[1]}:{sys.argv[2]}/", retries=False)
    print(response.status, response.data.decode().strip())
except urllib3.exceptions.HTTPError as error:
    # The object's address differs from run to run.
    print(type(error).__name__, re.sub(r"0x[0-9a-f]+", "0x", str(error)), file=sys.stderr)
    sys.exit(7)

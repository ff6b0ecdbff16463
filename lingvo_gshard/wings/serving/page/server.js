// Talks to the server.

const TOKEN = "gshard-token";

class ServerError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

// Sends a request, and returns the response of a server that accepts it.
async function request(path, body, signal) {
  const headers = {};
  const token = sessionStorage.getItem(TOKEN);
  if (token) headers.Authorization = `Bearer ${token}`;
  const options = { headers, signal };
  if (body) Object.assign(options, { method: "POST", body: JSON.stringify(body) });
  let response;
  try {
    response = await fetch(path, options);
  } catch {
    throw new ServerError(0, "The server does not answer.");
  }
  if (response.ok) return response;
  const value = await response.json().catch(() => ({}));
  throw new ServerError(response.status, value.error?.message || `Status ${response.status}`);
}

async function call(path, body) {
  const response = await request(path, body);
  return response.json().catch(() => ({}));
}

// Yields the values of server-sent events, as OpenAI's API sends them.
async function* events(path, body, signal) {
  const response = await request(path, body, signal);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  const cut = new ServerError(0, "The connection ended before the answer was complete.");
  for (let text = ""; ;) {
    const { value, done } = await reader.read().catch(() => { throw cut; });
    if (done) throw cut;
    const complete = (text + value).split("\n\n");
    text = complete.pop();
    for (const event of complete) {
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const found = JSON.parse(data);
      if (found.error) throw new ServerError(0, found.error.message);
      yield found;
    }
  }
}

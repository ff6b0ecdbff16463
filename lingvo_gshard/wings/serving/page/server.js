// Talks to the server.

const TOKEN = "gshard-token";

class ServerError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function call(path, body) {
  const headers = {};
  const token = sessionStorage.getItem(TOKEN);
  if (token) headers.Authorization = `Bearer ${token}`;
  const options = { headers };
  if (body) Object.assign(options, { method: "POST", body: JSON.stringify(body) });
  let response;
  try {
    response = await fetch(path, options);
  } catch {
    throw new ServerError(0, "The server does not answer.");
  }
  const value = await response.json().catch(() => ({}));
  if (!response.ok) throw new ServerError(response.status, value.error?.message || `Status ${response.status}`);
  return value;
}
